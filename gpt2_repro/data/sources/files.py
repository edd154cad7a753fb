"""A source is made of files, and a file of parts: each part is one task of a worker process."""

import abc
import dataclasses
from collections.abc import Iterator


@dataclasses.dataclass(frozen=True)
class Batch:
    """Documents in their order.

    Args:
        documents: texts, '' for a row that holds none.
        bad: of each row that could not be read, its place and what is wrong.
        read: bytes of the file that were read for them.
    """

    documents: list[str]
    bad: list[str] = dataclasses.field(default_factory=list)
    read: int = 0


class Part(abc.ABC):
    """A stretch of a file. Picklable, and a function of the file alone, so that any number of workers agree."""

    size: int  # bytes of the file

    @abc.abstractmethod
    def read(self) -> Iterator[Batch]:
        """Documents in their order. Raises UserError, with the file's name, where they cannot be read at all."""


class SourceFile(abc.ABC):
    """A file of a source, here or to be fetched."""

    name: str
    size: int  # bytes

    def fetch(self) -> None:  # noqa: B027 - most files are here
        """Bring it to this disk, if it is not there. Raises UserError where that fails."""

    @abc.abstractmethod
    def parts(self) -> list[Part]:
        """Its parts in their order, once it has been fetched."""

    def drop(self) -> None:  # noqa: B027 - most files are the user's
        """Its tokens are staged: what was fetched for them may go."""


class WholeFile(SourceFile, Part):
    """A file whose only part is itself."""

    def parts(self) -> list[Part]:
        return [self]


def in_batches(rows: Iterator[tuple[str | None, str, int]], size: int = 2**20) -> Iterator[Batch]:
    """Group rows of (text or None, what is wrong if it is None, bytes read) to batches of about `size` characters."""
    batch, bad, characters, read = [], [], 0, 0
    for text, wrong, length in rows:
        read += length
        if text is None:
            bad.append(wrong)
        else:
            batch.append(text)
            characters += len(text)
        if characters >= size or len(batch) + len(bad) >= 1000:
            yield Batch(batch, bad, read)
            batch, bad, characters, read = [], [], 0, 0
    if batch or bad or read:
        yield Batch(batch, bad, read)

"""A source is made of files, and a file of parts: each part is one task of a worker process."""

import abc
import dataclasses
from collections.abc import Iterable, Iterator


@dataclasses.dataclass(frozen=True)
class Batch:
    """Documents in their order.

    Args:
        documents: texts, '' for a row that holds none.
        bad: of each row that could not be read, its place and what is wrong.
    """

    documents: list[str]
    bad: list[str] = dataclasses.field(default_factory=list)


class Part(abc.ABC):
    """A stretch of a file. Picklable, and a function of the file alone, so that any number of workers agree."""

    name: str  # of the file
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


def in_batches(rows: Iterable[tuple[str | None, str]]) -> Iterator[Batch]:
    """Group rows of (text or None, what is wrong if it is None) to batches of about a million characters."""
    batch, characters = Batch([]), 0
    for text, wrong in rows:
        if text is None:
            batch.bad.append(wrong)
        else:
            batch.documents.append(text)
            characters += len(text)
        if characters >= 2**20 or len(batch.documents) + len(batch.bad) >= 1000:
            yield batch
            batch, characters = Batch([]), 0
    yield batch

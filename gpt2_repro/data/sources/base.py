"""Define base classes for sources, their files and the parts of a file."""

import abc
import contextlib
import dataclasses
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from gpt2_repro.errors import UserError, in_a_line


@dataclasses.dataclass(frozen=True)
class TextForm:
    """Settings that decide how the rows of a file become documents.

    Args:
        text_column: key or column with the text.
        verbatim: whether the line breaks in .csv, .json and .jsonl files are kept. Otherwise, CR LF becomes LF.
        drops_front_matter: whether the YAML block at the start of a Markdown file is left out.
    """

    text_column: str = "text"
    verbatim: bool = False
    drops_front_matter: bool = False


@dataclasses.dataclass(frozen=True)
class Batch:
    """Documents in order ('' for a row without text), and the errors of bad rows.

    `front_matter` counts the documents that had front matter.
    """

    documents: list[str]
    bad: list[str] = dataclasses.field(default_factory=list)
    front_matter: int = 0


class Part(abc.ABC):
    """A contiguous part of a file, which a worker process reads.

    Parts must be picklable, because they are sent to worker processes. The same file must always be divided into the
    same parts, because a resumed preparation does not repeat finished parts.
    """

    name: str  # name of the file
    size: int  # bytes of this part, for the progress bar

    @abc.abstractmethod
    def read(self) -> Iterator[Batch]:
        """Yield the documents of the part in order."""

    def documents(self) -> Iterator[str]:
        for batch in self.read():
            yield from batch.documents


class SourceFile(abc.ABC):
    """A file of a source: a local file, or a file that can be downloaded."""

    name: str
    size: int  # bytes
    source: str  # the name under which its tokens are counted, such as an entry of --data_files

    def identity(self) -> tuple[str, ...]:
        """Return a key that is equal for all SourceFile objects of the same file."""
        return (self.name,)

    def fetch(self) -> None:  # noqa: B027 - most files are local
        """Download the file if it is not on the local disk."""

    @abc.abstractmethod
    def parts(self) -> list[Part]:
        """Return the parts of the file in order. Call `fetch` before this method."""

    def drop(self) -> None:  # noqa: B027 - most files are the user's
        """Delete the local copy of the file, if it was downloaded."""


class WholeFile(SourceFile, Part):
    """A file that is read in a single part."""

    def parts(self) -> list[Part]:
        return [self]


@dataclasses.dataclass(frozen=True)
class Source:
    """A source of documents."""

    description: dict[str, Any]  # for the manifest, including the revision of a Hub dataset
    files: list[SourceFile]
    validation_files: list[SourceFile]  # the source's own validation files, if any


def in_batches(rows: Iterable[tuple[str | None, str]]) -> Iterator[Batch]:
    """Group rows into batches of at most 1,000 rows and about a million characters.

    Args:
        rows: pairs of a text and an error message; the text is None if the row could not be read.
    """
    batch = Batch([])
    characters = 0
    for text, wrong in rows:
        if text is None:
            batch.bad.append(wrong)
        else:
            batch.documents.append(text)
            characters += len(text)
        if characters >= 2**20 or len(batch.documents) + len(batch.bad) >= 1000:
            yield batch
            batch = Batch([])
            characters = 0
    yield batch


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Convert exceptions from a damaged file into a UserError that names the file."""
    import pyarrow as pa

    try:
        yield
    except PermissionError:
        raise  # reported with the path by cli.run
    except (UnicodeError, EOFError, OSError, pa.ArrowInvalid) as error:
        raise UserError(f"{path} is damaged, or has the wrong extension ({in_a_line(error)}).") from None

"""A source is made of files, and a file of parts: each part is one task of a worker process."""

import abc
import contextlib
import csv
import dataclasses
from collections.abc import Iterable, Iterator
from pathlib import Path

import pyarrow as pa

from gpt2_repro.errors import UserError


@dataclasses.dataclass(frozen=True)
class TextForm:
    """How rows become documents.

    Args:
        text_column: of jsonl, csv and parquet.
        sample_by: what of a .txt file is a document: all of it (document), a line or a paragraph.
        first_row: of parquet, where given: a row that begins and ends with this, once, starts a document, and the rows
            up to the next such one belong to it (WikiText has a row a line and ` = Title = ` as the first of a page).
    """

    text_column: str = "text"
    sample_by: str = "document"
    first_row: str = ""


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
    size: int  # bytes of this part, for the progress bar

    @abc.abstractmethod
    def read(self) -> Iterator[Batch]:
        """Documents in their order. Raises UserError, with the file's name, where they cannot be read at all."""


class SourceFile(abc.ABC):
    """A file of a source, here or to be fetched."""

    name: str
    size: int  # bytes

    def identity(self) -> tuple[str, ...]:
        """Tell the documents of this file from those of any other file."""
        return (self.name,)

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


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn what a damaged file raises into a UserError with its name."""
    try:
        yield
    except (UnicodeError, EOFError, OSError, pa.ArrowInvalid, csv.Error) as error:
        raise UserError(f"{path} cannot be read: {' '.join(str(error).split())[:200]}") from None

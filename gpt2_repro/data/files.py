"""A file of documents: what every source is made of, and the kinds that lie on this disk."""

import abc
import dataclasses
import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet

from gpt2_repro.errors import UserError


# Documents of a batch, and the share of the file (0 to 1) that has been read with them.
Batch = tuple[list[str], float]

BATCH_DOCUMENTS = 1000


class SourceFile(abc.ABC):
    """One file of a source. Picklable, so that a worker process can read it."""

    name: str

    @abc.abstractmethod
    def read(self) -> Iterator[Batch]:
        """Documents in their order, in batches."""


def batches(documents: Iterator[tuple[str, float]]) -> Iterator[Batch]:
    """Group documents, each with the share of the file read with it."""
    batch: list[str] = []
    share = 0.0
    for document, share in documents:
        batch.append(document)
        if len(batch) == BATCH_DOCUMENTS:
            yield batch, share
            batch = []
    if batch:
        yield batch, share


def kind_of(path: Path) -> str:
    """The ending that says how to read a file, .gz aside."""
    return Path(path.name.removesuffix(".gz")).suffix


@dataclasses.dataclass(frozen=True)
class LocalFile(SourceFile):
    """A text file (one document), or a jsonl or parquet file (a document a row, in its column `text`)."""

    name: str

    def read(self) -> Iterator[Batch]:
        """Raises UserError, with the file's name, for one that is damaged or of another form."""
        path = Path(self.name)
        try:
            yield from self._read_parquet(path) if kind_of(path) == ".parquet" else batches(self._read_text(path))
        except (UnicodeDecodeError, EOFError, OSError, zlib.error, pa.ArrowInvalid) as error:
            raise UserError(f"{path} cannot be read: {' '.join(str(error).split())[:200]}") from None

    def _read_parquet(self, path: Path) -> Iterator[Batch]:
        with pyarrow.parquet.ParquetFile(path) as table:
            field = table.schema_arrow.field("text") if "text" in table.schema_arrow.names else None
            if field is None or field.type not in (pa.string(), pa.large_string()):
                raise UserError(f"{path} has no text column `text`: it has {', '.join(table.schema_arrow.names)}")
            rows, done = table.metadata.num_rows, 0
            for batch in table.iter_batches(BATCH_DOCUMENTS, columns=["text"]):
                done += len(batch)
                yield [text or "" for text in batch.column(0).to_pylist()], done / rows

    def _read_text(self, path: Path) -> Iterator[tuple[str, float]]:
        size = max(1, path.stat().st_size)
        with path.open("rb") as raw:
            lines = gzip.open(raw) if path.suffix == ".gz" else raw
            if kind_of(path) == ".txt":
                yield lines.read().decode("utf-8"), 1.0
                return
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    text = json.loads(line)["text"]
                except (ValueError, KeyError, TypeError):
                    text = 0
                if not isinstance(text, str | None):
                    raise UserError(f"{path}, line {number}, is no JSON object with a text under the key `text`")
                yield text or "", min(1.0, raw.tell() / size)

"""Files of text on this disk: .txt, .jsonl, .csv and .parquet, the first three also as .gz and .zst."""

import contextlib
import csv
import dataclasses
import io
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa

from gpt2_repro.data.sources.base import Batch, Part, SourceFile, in_batches
from gpt2_repro.data.sources.parquet_files import read_row_groups, stretches
from gpt2_repro.errors import UserError


COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
KINDS = (".txt", ".jsonl", ".csv", ".parquet")
PART_BYTES = 2**25  # of text: a worker's task of a quarter of a second
LONGEST_DOCUMENT = 2**27  # bytes: a worker needs twelve times as much memory
BYTE_ORDER_MARK = "\ufeff".encode()  # Windows editors put it at the start of a UTF-8 file; it is not text


@dataclasses.dataclass(frozen=True)
class TextForm:
    """How rows become documents.

    Args:
        text_column: of jsonl, csv and parquet.
        sample_by: what of a .txt file is a document: all of it (document), a line or a paragraph.
        first_row: where given, a row that begins and ends with this, once, starts a document, and the rows up to the
            next such one belong to it (WikiText has a row a line and ` = Title = ` as the first of a page).
    """

    text_column: str = "text"
    sample_by: str = "document"
    first_row: str = ""


def kind_of(path: Path) -> str:
    """The ending that says how to read a file, .gz and .zst aside."""
    return Path(path.stem).suffix if path.suffix in COMPRESSIONS else path.suffix


@dataclasses.dataclass(frozen=True)
class TextFile(SourceFile):
    """A file of text on this disk."""

    name: str
    size: int
    form: TextForm = TextForm()

    def parts(self) -> list[Part]:
        path, kind = Path(self.name), kind_of(Path(self.name))
        if kind == ".parquet":
            with _reading(path):
                # A page must not end where a part does.
                groups = stretches(path, self.form.text_column, sys.maxsize if self.form.first_row else PART_BYTES)
            return [
                TextPart(self.name, self.form, start, stop, int(share * self.size)) for start, stop, share in groups
            ]
        by_line = kind == ".jsonl" or (kind == ".txt" and self.form.sample_by == "line")
        if not by_line or path.suffix in COMPRESSIONS or self.form.first_row:
            return [TextPart(self.name, self.form, 0, self.size, self.size)]
        starts = range(0, max(1, self.size), PART_BYTES)
        ends = [min(start + PART_BYTES, self.size) for start in starts]
        return [TextPart(self.name, self.form, a, b, b - a) for a, b in zip(starts, ends, strict=True)]


@dataclasses.dataclass(frozen=True)
class TextPart(Part):
    """Of a parquet file the row groups from `start` up to `stop`; of others the lines that begin in these bytes."""

    name: str
    form: TextForm
    start: int
    stop: int
    size: int

    def read(self) -> Iterator[Batch]:
        path, kind = Path(self.name), kind_of(Path(self.name))
        with _reading(path):
            if kind == ".parquet":
                batches = read_row_groups(path, self.form.text_column, self.start, self.stop, size=self.size)
            elif kind == ".csv":
                batches = in_batches(self._csv(path))
            elif kind == ".txt" and self.form.sample_by == "document":
                batches = in_batches(self._document(path))
            elif kind == ".txt" and self.form.sample_by == "paragraph":
                batches = in_batches(self._rows(self._paragraphs(path), _line_row))
            else:
                batches = in_batches(self._rows(self._lines(path), _jsonl_row if kind == ".jsonl" else _line_row))
            yield from _joined(batches, self.form.first_row) if self.form.first_row else batches

    def _lines(self, path: Path) -> Iterator[tuple[bytes, int]]:
        """Lines that begin in the part's bytes, and the number of each from the part's beginning on."""
        with open_bytes(path) as stream:
            at = number = 0
            if self.start:
                stream.seek(self.start - 1)
                while (rest := stream.readline(2**20)) and not rest.endswith(b"\n"):
                    pass
                at = stream.tell()
            while path.suffix in COMPRESSIONS or at < self.stop:
                line = stream.readline(LONGEST_DOCUMENT + 1)
                if not line:
                    break
                number += 1
                at += len(line)
                if len(line) > LONGEST_DOCUMENT:
                    raise UserError(f"{path}, line {self._line(number)}, is longer than {LONGEST_DOCUMENT:,} bytes")
                yield line.removeprefix(BYTE_ORDER_MARK) if number == 1 and not self.start else line, number

    def _line(self, number: int) -> int:
        """The number of a line in the whole file."""
        before = at = 0
        with Path(self.name).open("rb") as file:
            while at < self.start:
                at += len(file.readline())
                before += 1
        return before + number

    def _rows(
        self, lines: Iterator[tuple[bytes, int]], parse: Callable[[bytes, str], str | None]
    ) -> Iterator[tuple[str | None, str]]:
        for line, number in lines:
            try:
                text = parse(line, self.form.text_column)
            except ValueError as error:
                wrong = "is no valid Unicode" if isinstance(error, UnicodeError) else str(error)
                yield None, f"{self.name}, line {self._line(number)}, {wrong}"
            else:
                if text is not None:
                    yield text, ""

    def _paragraphs(self, path: Path) -> Iterator[tuple[bytes, int]]:
        """Yield paragraphs as `_lines` yields lines: the text, the number of its first line."""
        held: list[bytes] = []
        size = first = 0
        for line, number in self._lines(path):
            if line.strip():
                first = first or number
                held.append(line)
                size += len(line)
            elif held:
                yield b"".join(held), first
                held, size, first = [], 0, 0
            if size > LONGEST_DOCUMENT:
                raise UserError(f"{path}, line {first}, begins a paragraph of more than {LONGEST_DOCUMENT:,} bytes")
        if held:
            yield b"".join(held), first

    def _document(self, path: Path) -> Iterator[tuple[str | None, str]]:
        with open_bytes(path) as stream:
            content = stream.read(LONGEST_DOCUMENT + 1)
        if len(content) > LONGEST_DOCUMENT:
            raise UserError(f"{path} is longer than {LONGEST_DOCUMENT:,} bytes: pass --sample_by paragraph or line")
        try:
            yield content.removeprefix(BYTE_ORDER_MARK).decode("utf-8"), ""
        except UnicodeDecodeError as error:
            yield None, f"{path} is no valid UTF-8 at byte {error.start}"

    def _csv(self, path: Path) -> Iterator[tuple[str | None, str]]:
        csv.field_size_limit(LONGEST_DOCUMENT)
        column = self.form.text_column
        with open_bytes(path) as stream:
            text = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline="")
            # strict: without it an unclosed quote swallows all rows up to the next quote.
            rows = csv.reader(text, strict=True)
            number = line = 0
            try:
                header = next(rows, [])
                if (columns := header.count(column)) != 1:
                    raise UserError(
                        f"{path} has no text column `{column}`. Pass --text_column with one of: {', '.join(header)}."
                        if not columns
                        else f"{path} names the text column `{column}` {columns} times. Rename all but one."
                    )
                place = header.index(column)
                line = rows.line_num
                for row in rows:
                    line = rows.line_num
                    if row:  # a blank line is not a row
                        number += 1
                        wrong = _wrong_fields(row, len(header), place)
                        yield None if wrong else row[place], f"{path}, line {line}, {wrong}"
            except csv.Error as error:
                where = f"{path}, row {number + 1} (line {line + 1})"
                raise UserError(f"{where}, is not valid CSV ({error}). Close its quotes.") from None


def _wrong_fields(row: list[str], expected: int, place: int) -> str:
    """Return what is wrong with a CSV row whose text is field `place`, or ""."""
    if len(row) > expected:
        return "has too many fields"
    if len(row) <= place:
        return "has too few fields"
    try:
        row[place].encode()
    except UnicodeEncodeError:
        return "is no valid UTF-8"
    return ""


def _line_row(line: bytes, column: str) -> str:
    return line.rstrip(b"\r\n").decode("utf-8")


def _jsonl_row(line: bytes, column: str) -> str | None:
    """The text of a line; None for a blank one. Raises ValueError for anything else."""
    # Left to itself, json lets halves of surrogate pairs pass that are written as bytes.
    decoded = line.decode().removeprefix("\ufeff")
    if not decoded.strip():
        return None
    try:
        text = json.loads(decoded)[column]
    except (ValueError, KeyError, TypeError, RecursionError):
        text = 0
    if not isinstance(text, str | None):
        raise ValueError(f"is no JSON object with a text under the key `{column}`")
    if text and b"\\u" in line:
        text.encode()  # half of a surrogate pair has no UTF-8
    return text or ""


def _joined(batches: Iterator[Batch], first_row: str) -> Iterator[Batch]:
    held: list[str] = []
    for batch in batches:
        documents = []
        for row in batch.documents:
            begins = row.startswith(first_row) and not row.startswith(first_row + first_row.lstrip())
            if held and begins and row.rstrip().endswith(first_row.strip()):
                documents.append("".join(held))
                held = []
            held.append(row)
        yield Batch(documents, batch.bad)
    if held:
        yield Batch(["".join(held)])


def open_bytes(path: Path) -> BinaryIO:
    """Open a file for reading its decompressed bytes."""
    if path.suffix not in COMPRESSIONS:
        return path.open("rb", 2**20)
    inflated: Any = pa.input_stream(str(path), compression=COMPRESSIONS[path.suffix])
    return io.BufferedReader(inflated, 2**20)


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn what a damaged file raises into a UserError with its name."""
    try:
        yield
    except (UnicodeError, EOFError, OSError, pa.ArrowInvalid, csv.Error) as error:
        raise UserError(f"{path} cannot be read: {' '.join(str(error).split())[:200]}") from None

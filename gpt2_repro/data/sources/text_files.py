"""Read text files: .txt, .md, .json, .jsonl and .csv, each also as .gz or .zst."""

import csv
import dataclasses
import io
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa

from gpt2_repro.data.sources.base import Batch, Part, TextForm, in_batches, reading
from gpt2_repro.data.sources.front_matter import without_front_matter
from gpt2_repro.errors import UserError, in_a_line


MARKDOWN = ".md"  # also .markdown
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
LONGEST_DOCUMENT = 2**27  # bytes; a worker needs twelve times as much memory
BYTE_ORDER_MARK = "\ufeff".encode()  # Windows editors put it at the start of a UTF-8 file; it is not text
CONTROLS = bytes(set(range(32)) - set(b"\t\n\v\f\r\x1b"))  # text has few of these characters

# The bytes of a line or file, a JSON value or a CSV field, and its number counted from the start of the part.
Item = tuple[Any, int]
Row = tuple[str | None, str]  # text or None, and the error message if the text is None


@dataclasses.dataclass(frozen=True)
class TextPart(Part):
    """The lines of a text file that begin in the byte range [`start`, `stop`).

    Args:
        kind: format of the part: .txt, .md, .jsonl, .csv, or .json (a file with a single JSON array).
    """

    name: str
    kind: str
    form: TextForm
    start: int
    stop: int
    size: int

    @property
    def is_document(self) -> bool:
        """Whether the file is one document."""
        return self.kind in (".txt", MARKDOWN)

    def read(self) -> Iterator[Batch]:
        path = Path(self.name)
        with reading(path), open_bytes(path) as stream:
            if self.is_document and _is_binary(stream.peek(4096)[:4096]):  # type: ignore[attr-defined]
                yield Batch([], [f"{self.name} is UTF-16 or a binary file, not text in UTF-8"])
                return
            for batch in in_batches(self._rows(stream)):
                if self.kind == MARKDOWN and self.form.drops_front_matter:
                    yield _without_front_matter(batch)
                else:
                    yield batch

    def _rows(self, stream: BinaryIO) -> Iterator[Row]:
        verbatim = self.form.verbatim and not self.is_document
        readers = {".jsonl": self._lines, ".json": self._array, ".csv": self._csv}
        read = readers.get(self.kind, self._document)
        for item, number in read(stream):
            try:
                text = self._text_of(item)
                text.encode()  # raises UnicodeEncodeError for half of a surrogate pair
                if not verbatim:
                    text = text.replace("\r\n", "\n")
                yield text, ""
            except (ValueError, RecursionError) as error:
                yield None, f"{self._place(number)} {in_a_line(error)}"

    def _text_of(self, item: Any) -> str:
        """Return the text of an item. Raises ValueError if there is none."""
        if self.is_document:
            return item.decode()
        value = item
        if self.kind == ".jsonl":
            # Decode first: json.loads would accept halves of surrogate pairs that are encoded as bytes.
            value = json.loads(item.decode().removeprefix("\ufeff"))
        if isinstance(value, str):
            return value
        if self.kind == ".csv":
            raise ValueError("has too many or too few fields")
        column = self.form.text_column
        if not isinstance(value, dict) or column not in value:
            keys = "none, because it is not an object"
            if isinstance(value, dict):
                keys = ", ".join(value)[:200]
            raise ValueError(f"has no key `{column}` (pass --text_column). Its keys: {keys}")
        text = value[column]
        if not isinstance(text, str | None):
            raise ValueError(f"has a {type(text).__name__} under the key `{column}`, not a string")
        return text or ""

    def _lines(self, stream: BinaryIO) -> Iterator[Item]:
        """Yield the lines that are not blank."""
        at = 0
        number = 0
        if self.start:
            stream.seek(self.start - 1)
            rest = stream.readline(2**20)  # of the line in which the part begins
            while rest and not rest.endswith(b"\n"):
                rest = stream.readline(2**20)
            at = stream.tell()
        while Path(self.name).suffix in COMPRESSIONS or at < self.stop:
            line = stream.readline(LONGEST_DOCUMENT + 1)
            if not line:
                break
            number += 1
            at += len(line)
            if len(line) > LONGEST_DOCUMENT:
                raise UserError(f"{self._place(number)} is longer than {LONGEST_DOCUMENT:,} bytes. Split the line.")
            if number == 1 and not self.start:
                line = line.removeprefix(BYTE_ORDER_MARK)
            if line.strip():
                yield line, number

    def _place(self, number: int) -> str:
        """Return "FILE, line N," for an error, with N counted from the start of the file.

        `number` is the number of the line, counted from the byte `start` of the file.
        """
        before = 0
        at = 0
        with Path(self.name).open("rb") as file:
            while at < self.start:
                at += len(file.readline())
                before += 1
        unit = "item" if self.kind == ".json" else "line"
        return f"{self.name}, {unit} {before + number},"

    def _array(self, stream: BinaryIO) -> Iterator[Item]:
        try:
            items = json.loads(stream.read().removeprefix(BYTE_ORDER_MARK).decode())
        except (ValueError, RecursionError) as error:
            raise UserError(f"{self.name} is not valid JSON ({error}).") from None
        yield from zip(items, itertools.count(1), strict=False)

    def _document(self, stream: BinaryIO) -> Iterator[Item]:
        content = stream.read(LONGEST_DOCUMENT + 1)
        if len(content) > LONGEST_DOCUMENT:
            raise UserError(f"{self.name} is over {LONGEST_DOCUMENT:,} bytes. Split it, or convert it to .jsonl.")
        yield content.removeprefix(BYTE_ORDER_MARK), 1

    def _csv(self, stream: BinaryIO) -> Iterator[Item]:
        """Yield the field with the text of each row, or None if the row has too many or too few fields."""
        csv.field_size_limit(LONGEST_DOCUMENT)
        column = self.form.text_column.strip()
        line = 0
        try:
            with io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline="") as text:
                # strict, because otherwise an unclosed quote would include all rows up to the next quote.
                rows = csv.reader(text, strict=True)
                header = [name.strip() for name in next(rows, [])]
                if header.count(column) != 1:
                    fix = f"Pass --text_column with one of the names in its first line: {in_a_line(header)}."
                    raise UserError(f"{self.name} has {header.count(column)} columns `{column}`. {fix}")
                place = header.index(column)
                line = rows.line_num
                for row in rows:
                    line = rows.line_num
                    if not row:
                        continue  # a blank line is not a row
                    has_all_fields = place < len(row) <= len(header)
                    if has_all_fields:
                        yield row[place], line
                    else:
                        yield None, line
        except csv.Error as error:
            raise UserError(f"{self.name}, line {line + 1}, is not valid CSV ({error}). Check its quotes.") from None


def _without_front_matter(batch: Batch) -> Batch:
    """Return a batch of Markdown documents without their front matter, and count it."""
    documents = [without_front_matter(text) for text in batch.documents]
    count = 0
    for before, after in zip(batch.documents, documents, strict=True):
        if before != after:
            count += 1
    return Batch(documents, batch.bad, count)


def _is_binary(start: bytes) -> bool:
    """Return whether the first bytes of a file are UTF-16, compressed or binary."""
    # A text may have single NUL characters, but not the zero bytes of UTF-16 and binary files.
    controls = len(start) - len(start.translate(None, CONTROLS))
    invalid = len(start) - len(start.decode(errors="ignore").encode())
    return b"\0" in start and (4 * controls > len(start) or invalid > 3)  # 3: a character may be cut at the end


def is_json_array(path: Path) -> bool:
    """Return whether a .json file contains a single JSON array."""
    with reading(path), open_bytes(path) as stream:
        return stream.read(4096).removeprefix(BYTE_ORDER_MARK).lstrip().startswith(b"[")


def open_bytes(path: Path) -> BinaryIO:
    """Open a file and return a stream of its decompressed bytes."""
    if path.suffix not in COMPRESSIONS:
        return path.open("rb", 2**20)
    inflated: Any = pa.input_stream(str(path), compression=COMPRESSIONS[path.suffix])
    return io.BufferedReader(inflated, 2**20)

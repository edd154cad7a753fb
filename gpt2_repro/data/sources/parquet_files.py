"""Divide Parquet files into parts of complete row groups, and read their text."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet

from gpt2_repro.data.sources.base import Batch, Part, TextForm, reading
from gpt2_repro.errors import UserError


def parquet_parts(path: Path, size: int, form: TextForm, part_bytes: int) -> list[Part]:
    """Divide a file of `size` bytes into parts of complete row groups.

    A part has about `part_bytes` bytes of uncompressed columns.
    """
    with reading(path), pyarrow.parquet.ParquetFile(path) as table:
        _check_column(table.schema_arrow, path, form.text_column)
        sizes: list[int] = []
        for number in range(table.metadata.num_row_groups):
            row_group = table.metadata.row_group(number)
            sizes.append(row_group.total_byte_size)
    parts: list[Part] = []
    total = max(1, sum(sizes))
    start = 0
    held = 0  # bytes of the row groups since `start`
    for stop, size_of_group in enumerate(sizes, 1):
        held += size_of_group
        if held >= part_bytes or stop == len(sizes):
            size_in_file = int(held / total * size)
            parts.append(ParquetPart(str(path), form, start, stop, size_in_file))
            start = stop
            held = 0
    return parts


@dataclasses.dataclass(frozen=True)
class ParquetPart(Part):
    """The row groups of a Parquet file from `start` to `stop` (exclusive).

    `size` is the estimated number of bytes of these row groups in the file.
    """

    name: str
    form: TextForm
    start: int
    stop: int
    size: int

    def read(self) -> Iterator[Batch]:
        path = Path(self.name)
        column = self.form.text_column
        with reading(path), pyarrow.parquet.ParquetFile(path, buffer_size=2**20) as table:
            rows = [table.metadata.row_group(group).num_rows for group in range(self.stop)]
            rows_before = sum(rows[: self.start])
            rows_of_part = sum(rows[self.start :])
            # Aim for batches of a megabyte, under the assumption that the text has the size of the part in the file.
            rows_per_megabyte = rows_of_part * 2**20 // max(1, self.size)
            per_batch = min(1000, max(1, rows_per_megabyte))
            groups = list(range(self.start, self.stop))
            number = rows_before
            for records in table.iter_batches(per_batch, row_groups=groups, columns=[column], use_threads=False):
                batch = Batch([])
                for text in records.column(0):
                    number += 1
                    try:
                        batch.documents.append(text.as_py() or "")
                    except UnicodeDecodeError:
                        batch.bad.append(f"{path}, row {number}, is not valid UTF-8")
                yield batch


def _check_column(fields: pa.Schema, path: Path, column: str) -> None:
    """Raise UserError if a file does not have exactly one text column with this name."""
    names: list[str] = []
    for field in fields:
        kind = field.type
        if pa.types.is_dictionary(kind):
            kind = kind.value_type
        if kind in (pa.string(), pa.large_string(), pa.string_view()):
            names.append(field.name)
    count = names.count(column)
    if count != 1:
        fix = f"Pass --text_column with one of: {', '.join(names)}."
        raise UserError(f"{path} has {count} text columns `{column}`. {fix}")

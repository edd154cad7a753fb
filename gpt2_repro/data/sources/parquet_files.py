"""Parquet: row groups to stretches of like length, and the texts of such a stretch."""

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet

from gpt2_repro.data.sources.base import Batch
from gpt2_repro.errors import UserError


def stretches(path: Path, column: str, size: int) -> list[tuple[int, int, float]]:
    """Row groups of about `size` bytes of text: the first, the one behind the last, and their share of the file (0 to 1).

    Raises UserError where there is no such text column.
    """
    with pyarrow.parquet.ParquetFile(path) as table:
        place = _place(table, path, column)
        groups = [table.metadata.row_group(number).column(place) for number in range(table.metadata.num_row_groups)]
        sizes = [group.total_uncompressed_size for group in groups]
    found: list[tuple[int, int, float]] = []
    start, held, total = 0, 0, max(1, sum(sizes))
    for number, of_group in enumerate(sizes, 1):
        held += of_group
        if held >= size or number == len(sizes):
            found.append((start, number, held / total))
            start, held = number, 0
    return found


def read_row_groups(path: Path, column: str, start: int, stop: int, *, size: int) -> Iterator[Batch]:
    """The texts of the row groups from `start` up to `stop`, which are `size` bytes of the file."""
    with pyarrow.parquet.ParquetFile(path, buffer_size=2**20) as table:
        _place(table, path, column)
        rows = sum(table.metadata.row_group(group).num_rows for group in range(start, stop))
        before = sum(table.metadata.row_group(group).num_rows for group in range(start))
        # The stretch's share of the file is its text's: a batch of about a megabyte.
        per_batch = min(1000, max(1, rows * 2**20 // max(1, size)))
        groups = list(range(start, stop))
        for batch in table.iter_batches(per_batch, row_groups=groups, columns=[column], use_threads=False):
            texts, bad = _texts(batch.column(0), path, before)
            before += len(batch)
            yield Batch(texts, bad)


def _place(table: pyarrow.parquet.ParquetFile, path: Path, column: str) -> int:
    """The number of the text column among the file's primitive columns. Raises UserError where there is none."""
    names = table.schema_arrow.names
    field = table.schema_arrow.field(column) if column in names else None
    kind = field.type.value_type if field is not None and pa.types.is_dictionary(field.type) else field and field.type
    if field is None or not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise UserError(f"{path} has no text column `{column}`. Pass --text_column with one of: {', '.join(names)}.")
    return [table.schema.column(place).path for place in range(len(table.schema))].index(column)


def _texts(column: pa.Array, path: Path, before: int) -> tuple[list[str], list[str]]:
    try:
        return [text or "" for text in column.to_pylist()], []
    except UnicodeDecodeError:
        pass
    texts, bad = [], []
    for row, text in enumerate(column, before + 1):
        try:
            texts.append(text.as_py() or "")
        except UnicodeDecodeError:
            bad.append(f"{path}, row {row}, is no valid UTF-8")
    return texts, bad

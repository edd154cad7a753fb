"""The batches of a validation: each process its share of the rows, no row twice, nothing averaged on the way."""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from gpt2_repro.data.collator import IGNORED, collate_rows


def validation_batches(
    rows: Any, *, process: int, processes: int, size: int, fixed_length: int | None
) -> Iterator[tuple[dict[str, Tensor], int]]:
    """Batches of up to `size` rows on the CPU, each with its number of targets.

    Args:
        rows: map-style; a list of numbers gives `{"input_ids": [ids, …]}`.
        process: takes every row whose number is `process` modulo `processes`.
        fixed_length: where given, every batch is padded to `size` rows of this many targets, which are no targets:
            a compiled model then sees one shape.
    """
    mine = range(process, len(rows), processes)
    for start in range(0, len(mine), size):
        picked: Sequence[Any] = rows[list(mine[start : start + size])]["input_ids"]
        num_rows = size if fixed_length else None
        batch = collate_rows([{"input_ids": row} for row in picked], num_rows=num_rows, length=fixed_length)
        yield batch, int((batch["labels"] != IGNORED).sum())

"""The batches of a validation: each process its share of the rows, no row twice, nothing averaged on the way."""

import itertools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gpt2_repro.data.collator import IGNORED, collate_rows
from gpt2_repro.training.arguments import PretrainingArguments


logger = logging.getLogger(__name__)


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


def count_batches(sets: Iterable[Any], args: PretrainingArguments) -> int:
    """How many batches the first process has of these sets of rows, which has the most."""
    shares = [-(-len(rows) // args.world_size) for rows in sets]
    return sum(-(-share // args.per_device_eval_batch_size) for share in shares)


@torch.no_grad()
def sum_losses(
    model: Callable[..., Any],
    batches: Iterator[tuple[dict[str, Tensor], int]],
    device: torch.device,
    after_batch: Callable[[], None],
) -> Tensor:
    """The negative log-likelihood of all targets, and their number [2], in double precision on the device."""
    on_gpu = device.type == "cuda"
    total = torch.zeros(2, dtype=torch.float64, device=device)
    for batch, targets in batches:
        # Sums stay on the device and copies do not block: the host runs ahead.
        ids, labels = (
            (batch[name].pin_memory() if on_gpu else batch[name]).to(device, non_blocking=on_gpu)
            for name in ("input_ids", "shift_labels")
        )
        total[0] += model(input_ids=ids, shift_labels=labels, num_items_in_batch=1).loss.double()
        total[1] += targets
        after_batch()
    return total


def sum_over_sets(
    model: Callable[..., Any],
    sets: Iterable[Any],
    args: PretrainingArguments,
    *,
    length: int,
    goes_on: Callable[[], bool],
    after_batch: Callable[[], None],
) -> Tensor:
    """What `sum_losses` gives of this process's share of each set [sets, 2], up to where `goes_on` says no.

    `length`: targets of a full row.
    """
    sums = []
    for rows in sets:
        batches = validation_batches(
            rows,
            process=args.process_index,
            processes=args.world_size,
            size=args.per_device_eval_batch_size,
            fixed_length=length if args.compile_loss else None,
        )
        uncut = itertools.takewhile(lambda batch: goes_on(), batches)
        sums.append(sum_losses(model, uncut, args.device, after_batch))
    return torch.stack(sums)


def mean_losses(sums: Mapping[str, Sequence[float]], *, prefix: str, step: int) -> dict[str, float]:
    """Losses and numbers of targets as they are logged. A loss that is not finite is warned of.

    Args:
        sums: by set, "" for the main one: what `sum_losses` gives for all processes together.
        prefix: of the names: `eval_loss`, `eval_<set>_loss`.
        step: for the warning.
    """
    metrics: dict[str, float] = {}
    for name, (nll, targets) in sums.items():
        key = f"{prefix}_{name}" if name else prefix
        metrics |= {f"{key}_loss": nll / targets, f"{key}_tokens": int(targets)}
        if not math.isfinite(nll):
            logger.warning("the validation loss%s is not finite at step %d", f" of {name}" if name else "", step)
    return metrics

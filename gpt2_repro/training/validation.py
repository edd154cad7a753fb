"""What is measured between two steps: each process its share of the rows, no row twice, nothing averaged on the way."""

import functools
import itertools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from gpt2_repro.batch_plan import IGNORED
from gpt2_repro.data.batching import collate_rows
from gpt2_repro.data.rows import Rows
from gpt2_repro.training.arguments import PretrainingArguments
from gpt2_repro.training.inputs import Inputs


logger = logging.getLogger(__name__)


class Validation:
    """The losses of the validation sets, and HellaSwag where it is due, of all processes together.

    Args:
        inputs: the sets, and HellaSwag's items.
        length: targets of a full row.
        accelerator: sums over the processes.
    """

    def __init__(self, inputs: Inputs, args: PretrainingArguments, *, length: int, accelerator: Accelerator) -> None:
        self.sets, self.hellaswag, self.args, self.length = inputs.validation, inputs.hellaswag, args, length
        self.accelerator = accelerator
        self._positions = args.per_device_eval_batch_size * length  # what a pass of the losses has room for

    def batches(self, step: int) -> int:
        """How many passes the first process has at this step, which has the most."""
        shares = [-(-len(rows) // self.args.world_size) for rows in self.sets.values()]
        losses = sum(-(-share // self.args.per_device_eval_batch_size) for share in shares)
        if self.hellaswag is None or not due(step, self.args.hellaswag_steps, self.args):
            return losses
        return losses + -(-len(self.hellaswag.batches(self._positions)) // self.args.world_size)

    def measure(
        self, model: Callable[..., Any], *, step: int, goes_on: Callable[[], bool], after_batch: Callable[[], None]
    ) -> Callable[[], dict[str, float]]:
        """Measure until `goes_on` returns False, on all ranks; return a function that gives the metrics.

        Call that function on all ranks or on none: a part of a validation is no number.
        """
        sums = functools.partial(sum_losses, model, device=self.args.device, after_batch=after_batch)
        shares = [itertools.takewhile(lambda batch: goes_on(), self._share(rows)) for rows in self.sets.values()]
        mine = torch.stack([sums(share) for share in shares])
        endings: Tensor | None = None
        if self.hellaswag is not None and due(step, self.args.hellaswag_steps, self.args):
            endings = self.hellaswag.losses(
                lambda ids, labels: model(input_ids=ids, shift_labels=labels, reduction="none").loss,
                positions=self._positions,
                device=self.args.device,
                process=self.args.process_index,
                processes=self.args.world_size,
                goes_on=goes_on,
                after_batch=after_batch,
            )

        def metrics() -> dict[str, float]:
            reduced = self.accelerator.reduce(mine, reduction="sum").tolist()
            found: dict[str, float] = {}
            for name, (nll, targets) in zip(self.sets, reduced, strict=True):
                key = f"eval_{name}" if name else "eval"
                found |= {f"{key}_loss": nll / targets, f"{key}_tokens": int(targets)}
                if not math.isfinite(nll):
                    logger.warning("the validation loss is not finite at step %d: %s_loss", step, key)
            if endings is not None and self.hellaswag is not None:
                found |= self.hellaswag.score(self.accelerator.reduce(endings, reduction="sum"))
            return found

        return metrics

    def _share(self, rows: Rows) -> Iterator[tuple[dict[str, Tensor], int]]:
        return validation_batches(
            rows,
            process=self.args.process_index,
            processes=self.args.world_size,
            size=self.args.per_device_eval_batch_size,
            fixed_length=self.length if self.args.compile_loss else None,
        )


def due(step: int, every: int, args: PretrainingArguments) -> bool:
    """Whether what is to be done every so many steps, with a validation, is due with the one at this step.

    Before the first step, after the last, and at the first validation at or behind each multiple. `every` 0 is never.
    """
    if not every:
        return False
    return step in (0, args.last_step) or step // every > max(0, step - args.eval_steps) // every


def validation_batches(
    rows: Any, *, process: int, processes: int, size: int, fixed_length: int | None
) -> Iterator[tuple[dict[str, Tensor], int]]:
    """Batches of up to `size` rows on the CPU, each with its number of targets.

    All processes have as many: where weights are sharded, a pass is made by all or by none. Who has no row left gets
    one without targets.

    Args:
        rows: map-style; a list of numbers gives `{"input_ids": [ids, …]}`.
        process: takes every row whose number is `process` modulo `processes`.
        fixed_length: where given, every batch is padded to `size` rows of this many targets, which are no targets:
            a compiled model then sees one shape.
    """
    mine, longest_share = range(process, len(rows), processes), -(-len(rows) // processes)
    for start in range(0, longest_share, size):
        own = list(mine[start : start + size])
        picked: Sequence[Any] = rows[own or [0]]["input_ids"]
        num_rows = size if fixed_length else None
        batch = collate_rows([{"input_ids": row} for row in picked], num_rows=num_rows, length=fixed_length)
        if not own:
            batch["labels"].fill_(IGNORED)
        yield batch, int((batch["labels"] != IGNORED).sum())


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

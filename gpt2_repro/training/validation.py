"""Compute exact validation losses over rows that are split between the ranks."""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from accelerate.utils import reduce, send_to_device
from torch import Tensor

from gpt2_repro.data.batching import collate_rows
from gpt2_repro.data.rows import Rows
from gpt2_repro.evaluation.hellaswag import HellaSwag, mean_losses
from gpt2_repro.run_record import events
from gpt2_repro.run_record.environment import BatchPlan
from gpt2_repro.tokenization import bytes_of_ids, start_id
from gpt2_repro.tokens import IGNORED
from gpt2_repro.training.inputs import Inputs
from gpt2_repro.training.when import StepControl


logger = logging.getLogger(__name__)


class Validation:
    """Computes the losses of the validation sets and the HellaSwag score on all ranks."""

    def __init__(self, inputs: Inputs, args: Any, plan: BatchPlan, when: StepControl) -> None:
        self.sets = inputs.validation
        self.hellaswag = inputs.hellaswag
        self.when = when
        self.args = args
        self.settings = args.settings
        self.length = plan.sequence_length
        self._positions = args.per_device_eval_batch_size * self.length  # positions of one forward pass
        self._bytes = torch.from_numpy(bytes_of_ids(inputs.tokenizer))
        self._start = start_id(inputs.tokenizer)

    def _hellaswag(self, step: int) -> HellaSwag | None:
        if not self.when.is_due(step, self.settings.hellaswag_steps):
            return None
        return self.hellaswag

    def batches(self, step: int) -> int:
        """Return the number of forward passes of rank 0 in the validation at `step`."""
        batches = 0
        for rows in self.sets.values():
            share = math.ceil(len(rows) / self.args.world_size)
            batches += math.ceil(share / self.args.per_device_eval_batch_size)
        if self.settings.ema_steps and step:
            batches *= 2
        hellaswag = self._hellaswag(step)
        if hellaswag:
            passes = len(hellaswag.batches(self._positions))  # of all ranks
            batches += math.ceil(passes / self.args.world_size)
        return batches

    def measure(
        self, model: Callable[..., Any], *, step: int, after_batch: Callable[[], None], averaged: bool = False
    ) -> dict[str, float]:
        """Return the metrics of a validation. A collective.

        Args:
            after_batch: a function to call after each forward pass. Its exceptions end the validation.
            averaged: the weights are the average over steps. Keys begin with `eval_EMA`, and HellaSwag is not scored.
        """
        own_sums: list[Tensor] = []
        for rows in self.sets.values():
            own_sums.append(self._sum_losses(model, rows, after_batch))
        sums: Tensor = reduce(torch.stack(own_sums), reduction="sum")
        prefix = "eval"
        if averaged:
            prefix = events.AVERAGED
        metrics: dict[str, float] = {}
        for name, sums_of_set in zip(self.sets, sums.tolist(), strict=True):
            nll, targets, size = sums_of_set
            key = prefix
            if name:
                key = f"{prefix}_{name}"
            metrics[f"{key}_loss"] = nll / targets
            metrics[f"{key}_tokens"] = int(targets)
            if size:
                # The loss on separators is included: it is the price of the ends of documents.
                bits = nll / math.log(2)
                metrics[f"{key}_bits_per_byte"] = bits / size
            if not math.isfinite(nll):
                logger.warning("The validation loss %s_loss is not finite at step %d.", key, step)
        hellaswag = self._hellaswag(step)
        if hellaswag and not averaged:
            metrics |= self._score(hellaswag, model, after_batch)
        return metrics

    def _score(
        self, hellaswag: HellaSwag, model: Callable[..., Any], after_batch: Callable[[], None]
    ) -> dict[str, float]:
        """Return the HellaSwag metrics. A collective."""

        def losses(ids: Tensor, labels: Tensor) -> Tensor:
            outputs = model(input_ids=ids, shift_labels=labels, reduction="none")
            return outputs.loss

        endings = mean_losses(
            hellaswag.rows,
            losses,
            positions=self._positions,
            device=self.args.device,
            process=self.args.process_index,
            processes=self.args.world_size,
            after_batch=after_batch,
        )
        return hellaswag.score(reduce(endings, reduction="sum"))

    @torch.no_grad()
    def _sum_losses(self, model: Callable[..., Any], rows: Rows, after_batch: Callable[[], None]) -> Tensor:
        """Return this rank's sum of losses, targets and bytes of the targets' text, in fp64 of shape [3]."""
        device = self.args.device
        on_gpu = device.type == "cuda"
        place = device
        if device.type == "mps":
            place = torch.device("cpu")  # Apple GPUs have no fp64
        total = torch.zeros(3, dtype=torch.float64, device=place)
        fixed_length = None
        if self.settings.torch_compile:
            fixed_length = self.length
        start = self._start
        if start is None:
            start = -1  # no id
        for batch in validation_batches(rows, self.args, fixed_length):
            inputs: Any = {"input_ids": batch["input_ids"], "shift_labels": batch["shift_labels"]}
            if on_gpu:
                inputs = {name: tensor.pin_memory() for name, tensor in inputs.items()}
            # Sums stay on the device and copies do not block, so the host can queue work ahead of the device.
            inputs = send_to_device(inputs, device, non_blocking=on_gpu)
            outputs = model(**inputs, num_items_in_batch=1)
            total[0] += outputs.loss.to(place).double()
            labels = batch["labels"]
            is_target = labels != IGNORED
            total[1] += is_target.sum()
            begins_document = (batch["input_ids"] == start).long()
            num_bytes = self._bytes[begins_document[is_target], labels[is_target]]
            total[2] += num_bytes.sum()
            after_batch()
        return total


def validation_batches(rows: Any, args: Any, fixed_length: int | None) -> Iterator[dict[str, Tensor]]:
    """Yield this rank's batches of up to `args.per_device_eval_batch_size` rows, on the CPU.

    All processes get the same number of batches. A process without rows left gets batches without targets.

    Args:
        rows: a map-style dataset. Indexing it with a list of numbers returns `{"input_ids": [ids, …]}`.
        fixed_length: pad to a full batch of rows of this length. None: pad to the longest row of the batch.
    """
    size = args.per_device_eval_batch_size
    own_rows = range(args.process_index, len(rows), args.world_size)
    most_rows = math.ceil(len(rows) / args.world_size)  # of a process
    for start in range(0, most_rows, size):
        # All processes make the same number of passes: with sharded weights, each pass is a collective.
        batch_rows = list(own_rows[start : start + size])
        picked: Sequence[Any] = rows[batch_rows or [0]]["input_ids"]
        samples = [{"input_ids": row} for row in picked]
        num_rows = None
        if fixed_length:
            num_rows = size  # a compiled model must get only one shape
        batch = collate_rows(samples, num_rows=num_rows, length=fixed_length)
        if not batch_rows:
            batch["labels"].fill_(IGNORED)
        yield batch

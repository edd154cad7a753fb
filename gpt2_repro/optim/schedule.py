"""Compute the learning-rate schedule of llm.c."""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, assert_never

from torch.optim.lr_scheduler import LambdaLR

from gpt2_repro.optim import Schedule


def learning_rate_factor(
    step: int,
    *,
    warmup_steps: int,
    max_steps: int,
    final_factor: float = 0.0,
    extensions: Sequence[Sequence[int]] = (),
    kind: Schedule = "cosine",
    decay_fraction: float = 0.2,
) -> float:
    """Return the learning rate of an update as a fraction of the peak.

    The formulas are from llm.c (llmc/schedulers.h).

    Args:
        step: the number of the update, counted from 0.
        max_steps: the number of steps, without the steps added by extensions. The first decay ends at this step.
        final_factor: the learning rate at the end of the decay, as a fraction of the peak.
        extensions: ranges of steps, as [from, to], that were added to the run. In each range the rate rises to the
            peak and decays again (Ibrahim et al. 2024, arXiv:2403.08763).
        decay_fraction: the length of the decay as a fraction of `max_steps`, or of the range in an extension. Used
            only if `kind` is "warmup_stable_decay".
    """
    before, begin, end, rise = 0.0, 0, max_steps, warmup_steps

    def factor(at: int) -> float:
        if at - begin < rise:
            # The first update has a rate above 0.
            return before + (1 - before) * (at - begin + 1) / rise
        if kind == "constant":
            return 1.0
        if kind == "warmup_stable_decay":
            falling = round(decay_fraction * (end - begin))
            fallen = min(1.0, max(0, at - (end - falling)) / max(1, falling))
            return final_factor + (1.0 - math.sqrt(fallen)) * (1.0 - final_factor)
        if kind == "cosine":
            decay = min(1.0, (at - begin - rise) / max(1, end - begin - rise))
            return final_factor + 0.5 * (1.0 + math.cos(math.pi * decay)) * (1.0 - final_factor)
        assert_never(kind)

    for first, last in extensions:
        if step >= first:
            before, begin, end, rise = factor(first), first, last, min(warmup_steps, (last - first) // 2)
    return factor(step)


class LearningRate(LambdaLR):
    """A schedule whose peak can be changed."""

    def set_peak(self, learning_rate: float) -> None:
        """Change the peak of all groups, and with it the rate of the next update."""
        # A checkpoint restores the rate and the peak of the save. The recipe's peak may have changed since then.
        self.base_lrs = [learning_rate for _ in self.lr_lambdas]
        self._last_lr = [learning_rate * factor(self.last_epoch) for factor in self.lr_lambdas]
        for group, rate in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            group["lr"] = rate


def build_schedule(optimizer: Any, args: Any, run_identity: Mapping[str, Any]) -> LearningRate:
    """Return the schedule for PretrainingArguments and a run identity with its extensions."""
    factor = functools.partial(
        learning_rate_factor,
        warmup_steps=int(args.warmup_steps),
        max_steps=run_identity["max_steps"],
        final_factor=args.final_learning_rate_fraction,
        extensions=run_identity["extensions"],
        kind=args.lr_scheduler_type,
        decay_fraction=args.decay_fraction,
    )
    return LearningRate(optimizer, factor)

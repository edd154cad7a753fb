"""Compute the learning-rate schedule of llm.c."""

import functools
import math
from typing import Any, assert_never

from torch.optim.lr_scheduler import LambdaLR

from gpt2_repro.optim import Schedule


def learning_rate_factor(
    step: int,
    *,
    warmup_steps: int,
    max_steps: int,
    final_factor: float = 0.0,
    kind: Schedule = "cosine",
    decay_fraction: float = 0.2,
) -> float:
    """Return the learning rate of an update as a fraction of the peak.

    The formulas are from llm.c (llmc/schedulers.h).

    Args:
        step: the number of the update, counted from 0.
        max_steps: the number of steps. The decay ends at this step.
        final_factor: the learning rate at the end of the decay, as a fraction of the peak.
        decay_fraction: the length of the decay as a fraction of `max_steps`. Used only if `kind` is
            "warmup_stable_decay".
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps  # the first update has a rate above 0
    if kind == "constant":
        return 1.0
    if kind == "warmup_stable_decay":
        decay_steps = round(decay_fraction * max_steps)
        decayed_steps = max(0, step - (max_steps - decay_steps))
        progress = min(1.0, decayed_steps / max(1, decay_steps))
        return final_factor + (1.0 - math.sqrt(progress)) * (1.0 - final_factor)
    if kind == "cosine":
        progress = min(1.0, (step - warmup_steps) / max(1, max_steps - warmup_steps))
        return final_factor + 0.5 * (1.0 + math.cos(math.pi * progress)) * (1.0 - final_factor)
    assert_never(kind)


class LearningRate(LambdaLR):
    """A schedule whose peak can be changed."""

    def set_peak(self, learning_rate: float) -> None:
        """Change the peak of all groups, and with it the rate of the next update."""
        # A checkpoint restores the rate and the peak of the save. The recipe's peak may have changed since then.
        self.base_lrs = [learning_rate for _ in self.lr_lambdas]
        self._last_lr = [learning_rate * factor(self.last_epoch) for factor in self.lr_lambdas]
        for group, rate in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            group["lr"] = rate


def build_schedule(optimizer: Any, args: Any) -> LearningRate:
    """Return the schedule of a TrainingSection."""
    factor = functools.partial(
        learning_rate_factor,
        warmup_steps=int(args.warmup_steps),
        max_steps=args.max_steps,
        final_factor=args.final_learning_rate_fraction,
        kind=args.lr_scheduler_type,
        decay_fraction=args.decay_fraction,
    )
    return LearningRate(optimizer, factor)

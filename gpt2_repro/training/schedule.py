"""The learning-rate schedule: its formula, and torch's scheduler."""

import functools
import math
from collections.abc import Sequence
from typing import Any

from torch.optim.lr_scheduler import LambdaLR
from transformers import SchedulerType

from gpt2_repro.training.arguments import PretrainingArguments


def learning_rate_factor(
    step: int,
    *,
    warmup_steps: int,
    max_steps: int,
    final_factor: float = 0.0,
    extensions: Sequence[Sequence[int]] = (),
    kind: str = "cosine",
    decay_fraction: float = 0.2,
) -> float:
    """The learning rate of update `step` (from 0), relative to its peak: linear warm-up, then a fall.

    The formulas of llm.c (llmc/schedulers.h): (step+1)/warmup, so the first update already moves.

    Args:
        max_steps: where the fall ends.
        extensions: stretches of steps [from, to] that follow. In each the rate rises linearly from where it is to the
            peak, in warmup_steps or half of the stretch, and falls to the end (re-warming and re-decaying, Ibrahim et
            al. 2024, arXiv:2403.08763).
        kind: cosine; constant; warmup_stable_decay, which stays at the peak and falls by 1 - sqrt over the last
            `decay_fraction` of the steps.
    """
    before, begin, end, rise = 0.0, 0, max_steps, warmup_steps

    def factor(at: int) -> float:
        if at - begin < rise:
            return before + (1 - before) * (at - begin + 1) / rise
        if kind == "constant":
            return 1.0
        if kind == "warmup_stable_decay":
            falling = round(decay_fraction * (end - begin))
            fallen = min(1.0, max(0, at - (end - falling)) / max(1, falling))
            return final_factor + (1.0 - math.sqrt(fallen)) * (1.0 - final_factor)
        decay = min(1.0, (at - begin - rise) / max(1, end - begin - rise))
        return final_factor + 0.5 * (1.0 + math.cos(math.pi * decay)) * (1.0 - final_factor)

    for first, last in extensions:
        if step >= first:
            before, begin, end, rise = factor(first), first, last, min(warmup_steps, (last - first) // 2)
    return factor(step)


def build_schedule(optimizer: Any, args: PretrainingArguments, run_identity: dict[str, Any]) -> LambdaLR:
    """llm.c's warm-up and a fall up to the run's max_steps, and what it was extended by."""
    factor = functools.partial(
        learning_rate_factor,
        warmup_steps=int(args.warmup_steps),
        max_steps=run_identity["max_steps"],
        final_factor=args.final_learning_rate_fraction,
        extensions=run_identity["extensions"],
        kind=SchedulerType(args.lr_scheduler_type).value,
        decay_fraction=args.decay_fraction,
    )
    return LambdaLR(optimizer, factor)


def follow(schedule: LambdaLR, learning_rate: float) -> None:
    """Set the rate of the next update by this schedule.

    A checkpoint brings the rate that it was saved with, and the peak, and the schedule may be another one by now.
    """
    schedule.base_lrs = [learning_rate for _ in schedule.base_lrs]
    for group, factor in zip(schedule.optimizer.param_groups, schedule.lr_lambdas, strict=True):
        group["lr"] = learning_rate * factor(schedule.last_epoch)
    schedule._last_lr = [group["lr"] for group in schedule.optimizer.param_groups]

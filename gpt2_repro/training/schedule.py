"""The learning rate of each update, as torch's scheduler wants it."""

import functools
from typing import Any

from torch.optim.lr_scheduler import LambdaLR
from transformers import SchedulerType

from gpt2_repro.batch_plan import learning_rate_factor
from gpt2_repro.training.arguments import PretrainingArguments


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

"""Run train.py, and record the methods that are called in the steps.

Environment variables:
    CALLS: a file that gets one line for each call, such as `StepControl.on_step_end`.
"""

import functools
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import train
from gpt2_repro import cli


def record(owner: type, name: str) -> None:
    """Let a method write a line before it acts."""
    method: Callable[..., Any] = getattr(owner, name)

    @functools.wraps(method)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        with Path(os.environ["CALLS"]).open("a", encoding="utf-8") as file:
            file.write(f"{owner.__name__}.{name}\n")
        return method(*args, **kwargs)

    setattr(owner, name, recorded)


def record_steps() -> None:
    import torch
    from transformers import Trainer

    from gpt2_repro.checkpoints.saving import CheckpointSaver
    from gpt2_repro.optim.average import WeightAverage
    from gpt2_repro.optim.schedule import LearningRate
    from gpt2_repro.training.guard import UpdateGuard
    from gpt2_repro.training.meter import Meter
    from gpt2_repro.training.progress import ProgressBar
    from gpt2_repro.training.samples import TextSampler
    from gpt2_repro.training.step_profile import StepProfile
    from gpt2_repro.training.trainer import PretrainingTrainer
    from gpt2_repro.training.validation import Validation
    from gpt2_repro.training.when import StepControl, Watchdog

    # Every method of the Trainer and every event of a callback, so that the text cannot leave one out.
    for name, value in list(vars(PretrainingTrainer).items()):
        if inspect.isfunction(value) and name != "__init__":
            record(PretrainingTrainer, name)
    for callback in (UpdateGuard, StepControl, Watchdog, WeightAverage, ProgressBar, TextSampler, StepProfile):
        for name in list(vars(callback)):
            if name.startswith("on_"):
                record(callback, name)
    for owner, names in (
        (Trainer, ["training_step"]),
        (Meter, ["start", "read"]),
        (UpdateGuard, ["see_norm", "_before_update", "after_step"]),
        (StepControl, ["_request"]),
        (CheckpointSaver, ["wait_until_staged", "poll", "save", "finish"]),
        (Validation, ["measure"]),
        (LearningRate, ["step"]),
        (torch.optim.AdamW, ["step"]),
    ):
        for name in names:
            record(owner, name)


if __name__ == "__main__":
    record_steps()
    cli.run(train.main)

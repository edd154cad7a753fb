"""Run train.py with an injected fault.

Environment variables:
    FAULT: name of the fault.
    FAULT_AT: step or range of steps, for example 3 or 3-8.
    FAULT_RANK: rank of the process with the fault.
    FAULT_MARK: path of a file that is created when the fault happens.
"""

import math
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import torch

import train
from gpt2_repro import cli


FIRST, _, LAST = os.environ["FAULT_AT"].partition("-")
RUN = Path(sys.argv[sys.argv.index("--output_dir") + 1])
STEPS = range(int(FIRST), int(LAST or FIRST) + 1)


def saves(*args: Any, **kwargs: Any) -> bool:
    """Return whether the arguments contain the checkpoint path of a step in FAULT_AT.

    `args` and `kwargs` are the arguments of a function that saves checkpoints.
    """
    return any(f"checkpoint-{step}" in str(value).split("/") for step in STEPS for value in args)


def kill(original: Callable[[], Any], *args: Any, **kwargs: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail(original: Callable[[], Any], *args: Any, **kwargs: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")


def tear(original: Callable[[], Any], path: Path, **kwargs: Any) -> None:
    next(path.glob("*.pt")).unlink()
    kill(original)


def flip(original: Callable[[], Any], *args: Any, model: Any, **kwargs: Any) -> Any:
    model.transformer.wte.weight.data.view(torch.int16)[5, 7] ^= 1
    return original()


def fill_memory(original: Callable[[], Any], self: Any, model: Any, inputs: Any, *args: Any) -> Any:
    """Raise an out-of-memory error for micro-batches of more than one row.

    With activation checkpointing, the limit is two rows.
    """
    if len(inputs["input_ids"]) > (2 if self.args.activation_checkpointing else 1):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
    return original()


def inject(fault: str) -> None:
    """Patch a function so that calling the function on rank FAULT_RANK causes a fault."""
    from gpt2_repro.evaluation.hellaswag import HellaSwag
    from gpt2_repro.run_record import checkpoints
    from gpt2_repro.training.callbacks import ProgressBar
    from gpt2_repro.training.hashing import _HashedFile
    from gpt2_repro.training.samples import TextSampler
    from gpt2_repro.training.saving import CheckpointSaver
    from gpt2_repro.training.trainer import PretrainingTrainer
    from gpt2_repro.training.validation import Validation
    from gpt2_repro.training.when import StepControl

    always = lambda *_, **__: True  # noqa: E731
    at_step = lambda self, *_, **__: self.state.global_step + 1 in STEPS  # noqa: E731
    ends_at = lambda self, args, state, *_, **__: state.global_step in STEPS  # noqa: E731
    deletes = lambda path, **_: path.name.startswith("trash-") and path.exists()  # noqa: E731
    is_shard = lambda self, file: "optim_states" in file.name and saves(file.name)  # noqa: E731
    term = lambda original, *_, **__: (os.kill(os.getpid(), signal.SIGTERM), original())  # noqa: E731
    slow = lambda original, *_, **__: (time.sleep(0.5), original())  # noqa: E731
    samples = lambda self, args, step, *_, **__: step in STEPS  # noqa: E731
    validates = lambda *_, step, **__: step in STEPS  # noqa: E731
    is_saved = lambda *_, **__: any((RUN / f"checkpoint-{step}").is_dir() for step in STEPS)  # noqa: E731
    after_the_save: dict[str, tuple[Any, str, Callable[..., bool]]] = {
        "validation": (Validation, "measure", validates),
        "hellaswag": (HellaSwag, "collate", is_saved),
        "sampling": (TextSampler, "_sample", samples),
        "tracking": (TextSampler, "on_log", ends_at),  # guarded like the callback of wandb
    }
    faults: dict[str, tuple[Any, str, Callable[..., Any], Callable[..., bool]]] = {
        "kill_after_the_model": (PretrainingTrainer, "_save_optimizer_and_scheduler", kill, saves),
        "kill_before_a_shard": (_HashedFile, "__init__", kill, is_shard),
        "kill_before_the_manifest": (checkpoints, "seal", kill, saves),
        "kill_before_the_rename": (checkpoints, "publish", kill, saves),
        "kill_in_rotation": (checkpoints.shutil, "rmtree", tear, deletes),
        "term_while_saving": (checkpoints, "publish", term, saves),
        "no_foresight": (CheckpointSaver, "_make_room_or_skip", always, always),
        "flipped_bit": (StepControl, "on_step_end", flip, ends_at),
        "nan": (PretrainingTrainer, "compute_loss", lambda original, *_, **__: original() * math.nan, at_step),
        "hang": (PretrainingTrainer, "compute_loss", lambda *_, **__: time.sleep(3600), at_step),
        "small_device": (PretrainingTrainer, "training_step", fill_memory, always),
        "slow_validation": (ProgressBar, "on_prediction_step", slow, always),
    }
    for place, (owner, name, when) in after_the_save.items():
        faults |= {f"kill_in_{place}": (owner, name, kill, when), f"fail_in_{place}": (owner, name, fail, when)}
    owner, name, replacement, when = faults[fault]
    original = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        if os.environ.get("RANK", "0") != os.environ["FAULT_RANK"] or not when(*args, **kwargs):
            return original(*args, **kwargs)
        Path(os.environ["FAULT_MARK"]).touch()
        return replacement(lambda: original(*args, **kwargs), *args, **kwargs)

    setattr(owner, name, call)


if __name__ == "__main__":
    import gpt2_repro.training.fit as fit_module

    original_fit = fit_module.fit
    fit_module.fit = lambda *args: (inject(os.environ["FAULT"]), original_fit(*args))[1]
    cli.run(train.main)

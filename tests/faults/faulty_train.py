"""Run train.py with an injected fault.

Environment variables:
    FAULT: name of the fault.
    FAULT_AT: step or range of steps, for example 3 or 3-8.
    FAULT_RANK: rank of the process with the fault.
    FAULT_MARK: path of a file that is created when the fault happens.
"""

import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import torch

import train
from gpt2_repro import cli
from tests.faults import faulty_writer
from tests.faults.faulty_writer import STEPS, kill, patch, saves


RUN = Path(sys.argv[sys.argv.index("--output_dir") + 1])
WRITER = "import sys; from tests.faults.faulty_writer import serve; serve(int(sys.argv[1]))"


def fail(original: Callable[[], Any], *args: Any, **kwargs: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")


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
    from gpt2_repro.training import saving
    from gpt2_repro.training.callbacks import ProgressBar
    from gpt2_repro.training.samples import TextSampler
    from gpt2_repro.training.saving import CheckpointSaver
    from gpt2_repro.training.trainer import PretrainingTrainer
    from gpt2_repro.training.validation import Validation
    from gpt2_repro.training.when import StepControl

    always = lambda *_, **__: True  # noqa: E731
    at_step = lambda self, *_, **__: self.state.global_step + 1 in STEPS  # noqa: E731
    ends_at = lambda self, args, state, *_, **__: state.global_step in STEPS  # noqa: E731
    slow = lambda original, *_, **__: (time.sleep(0.5), original())  # noqa: E731
    samples = lambda self, args, step, *_, **__: step in STEPS  # noqa: E731
    validates = lambda *_, step, **__: step in STEPS  # noqa: E731
    places = (RUN / "staging", RUN)
    is_saved = lambda *_, **__: any((place / f"checkpoint-{step}").is_dir() for place in places for step in STEPS)  # noqa: E731
    after_the_save: dict[str, tuple[Any, str, Callable[..., bool]]] = {
        "validation": (Validation, "measure", validates),
        "hellaswag": (HellaSwag, "collate", is_saved),
        "sampling": (TextSampler, "_sample", samples),
        "tracking": (TextSampler, "on_log", ends_at),  # guarded like the callback of wandb
    }
    faults: dict[str, tuple[Any, str, Callable[..., Any], Callable[..., bool]]] = {
        "kill_after_the_model": (PretrainingTrainer, "_save_optimizer_and_scheduler", kill, saves),
        "no_foresight": (CheckpointSaver, "_free_space", lambda *_, **__: 0.0, always),
        "flipped_bit": (StepControl, "on_step_end", flip, ends_at),
        "nan": (PretrainingTrainer, "compute_loss", lambda original, *_, **__: original() * math.nan, at_step),
        "hang": (PretrainingTrainer, "compute_loss", lambda *_, **__: time.sleep(3600), at_step),
        "small_device": (PretrainingTrainer, "training_step", fill_memory, always),
        "slow_validation": (ProgressBar, "on_prediction_step", slow, always),
    }
    for place, (owner, name, when) in after_the_save.items():
        faults |= {f"kill_in_{place}": (owner, name, kill, when), f"fail_in_{place}": (owner, name, fail, when)}
    if fault in faulty_writer.FAULTS:
        saving.WRITER = WRITER
    else:
        patch(*faults[fault])


if __name__ == "__main__":
    import gpt2_repro.training.run as run_module

    original_fit = run_module.fit
    run_module.fit = lambda *args: (inject(os.environ["FAULT"]), original_fit(*args))[1]
    cli.run(train.main)

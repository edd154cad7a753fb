"""Run train.py with an injected fault, in the training process or in its writer.

Environment variables:
    FAULT: name of the fault.
    FAULT_AT: step or range of steps, for example 3 or 3-8.
    FAULT_RANK: rank of the process with the fault.
    FAULT_MARK: path of a file that is created when the fault happens.
"""

import errno
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import train
from gpt2_repro import cli
from gpt2_repro.run_record import checkpoints, writer


FIRST, _, LAST = os.environ["FAULT_AT"].partition("-")
STEPS = range(int(FIRST), int(LAST or FIRST) + 1)
WRITER = "import sys; from tests.faults.faulty_train import serve; serve(int(sys.argv[1]))"
# An owner, the name of its function, a replacement, and the condition for the arguments of a call.
Fault = tuple[Any, str, Callable[..., Any], Callable[..., bool]]


def patch(owner: Any, name: str, replacement: Callable[..., Any], when: Callable[..., bool]) -> None:
    """Replace a function on rank FAULT_RANK for arguments for which `when` is true."""
    original = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        if os.environ.get("RANK", "0") != os.environ["FAULT_RANK"] or not when(*args, **kwargs):
            return original(*args, **kwargs)
        Path(os.environ["FAULT_MARK"]).touch()
        return replacement(lambda: original(*args, **kwargs), *args, **kwargs)

    setattr(owner, name, call)


def saves(*args: Any, **kwargs: Any) -> bool:
    """Return whether the arguments contain the checkpoint path of a step in FAULT_AT."""
    return any(f"checkpoint-{step}" in str(value).split("/") for step in STEPS for value in args)


def is_shard(path: Path, *args: Any) -> bool:
    return "optim" in path.name and saves(path)


def deletes(path: Path, **kwargs: Any) -> bool:
    return path.name.startswith("trash-") and path.exists()


def always(*args: Any, **kwargs: Any) -> bool:
    return True


def signals(*processes: Callable[[], int], number: int = signal.SIGKILL) -> Callable[..., Any]:
    """Return a replacement that sends a signal to processes before the original call."""
    return lambda original, *_, **__: ([os.kill(process(), number) for process in processes], original())[1]


def waits(seconds: float) -> Callable[..., Any]:
    return lambda original, *_, **__: (time.sleep(seconds), original())[1]


def tear(original: Callable[[], Any], path: Path, **kwargs: Any) -> None:
    next(path.glob("*.pt")).unlink()
    os.kill(os.getpid(), signal.SIGKILL)


def refuse(original: Callable[[], Any], *args: Any, **kwargs: Any) -> None:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def fail(original: Callable[[], Any], *args: Any, **kwargs: Any) -> None:
    import torch

    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")


def flip(original: Callable[[], Any], *args: Any, model: Any, **kwargs: Any) -> Any:
    import torch

    model.transformer.wte.weight.data.view(torch.int16)[5, 7] ^= 1
    return original()


def fill_memory(original: Callable[[], Any], self: Any, model: Any, inputs: Any, *args: Any) -> Any:
    """Raise an out-of-memory error for micro-batches of more than one row.

    With activation checkpointing, the limit is two rows.
    """
    return (
        fail(original) if len(inputs["input_ids"]) > (2 if self.args.activation_checkpointing else 1) else original()
    )


kill, kill_trainer = signals(os.getpid), signals(os.getppid)
kill_both = signals(os.getppid, os.getpid)
OF_WRITER: dict[str, Fault] = {
    "kill_before_a_shard": (writer, "_write_file", kill, is_shard),
    "kill_before_the_manifest": (checkpoints, "seal", kill, saves),
    "kill_before_the_rename": (checkpoints, "publish", kill, saves),
    "read_only": (writer, "_write_file", refuse, saves),
    "slow_disk": (writer.HashedFile, "write", waits(4), always),
    "stuck_disk": (writer.HashedFile, "write", waits(3600), always),
    "kill_in_rotation": (checkpoints.shutil, "rmtree", tear, deletes),
    "term_while_saving": (checkpoints, "publish", signals(os.getppid, number=signal.SIGTERM), saves),
    "kill_trainer_before_a_shard": (writer, "_write_file", kill_trainer, is_shard),
    "kill_trainer_before_the_manifest": (checkpoints, "seal", kill_trainer, saves),
    "kill_both_before_a_shard": (writer, "_write_file", kill_both, is_shard),
    "kill_both_before_the_rename": (checkpoints, "publish", kill_both, saves),
}


def serve(descriptor: int) -> None:
    """Run the process that writes checkpoints, with the fault."""
    patch(*OF_WRITER[os.environ["FAULT"]])
    writer.serve(descriptor)


def faults_of_trainer() -> dict[str, Fault]:
    from gpt2_repro.evaluation.hellaswag import HellaSwag
    from gpt2_repro.training.callbacks import ProgressBar
    from gpt2_repro.training.samples import TextSampler
    from gpt2_repro.training.saving import CheckpointSaver
    from gpt2_repro.training.trainer import PretrainingTrainer
    from gpt2_repro.training.validation import Validation
    from gpt2_repro.training.when import StepControl

    run = Path(sys.argv[sys.argv.index("--output_dir") + 1])
    folders = [folder / f"checkpoint-{step}" for folder in (run / "staging", run) for step in STEPS]
    at_step = lambda self, *_, **__: self.state.global_step + 1 in STEPS  # noqa: E731
    ends_at = lambda self, args, state, *_, **__: state.global_step in STEPS  # noqa: E731
    after_the_save: dict[str, tuple[Any, str, Callable[..., bool]]] = {
        "validation": (Validation, "measure", lambda *_, step, **__: step in STEPS),
        "hellaswag": (HellaSwag, "collate", lambda *_, **__: any(folder.is_dir() for folder in folders)),
        "sampling": (TextSampler, "_sample", lambda self, args, step, *_, **__: step in STEPS),
        "tracking": (TextSampler, "on_log", ends_at),  # guarded like the callback of wandb
    }
    return {
        "kill_after_the_model": (PretrainingTrainer, "_save_optimizer_and_scheduler", kill, saves),
        "no_foresight": (CheckpointSaver, "_free_space", lambda *_, **__: 0.0, always),
        "flipped_bit": (StepControl, "on_step_end", flip, ends_at),
        "nan": (PretrainingTrainer, "compute_loss", lambda original, *_, **__: original() * math.nan, at_step),
        "hang": (PretrainingTrainer, "compute_loss", waits(3600), at_step),
        "small_device": (PretrainingTrainer, "training_step", fill_memory, always),
        "slow_validation": (ProgressBar, "on_prediction_step", waits(0.5), always),
        **{f"kill_in_{place}": (owner, name, kill, when) for place, (owner, name, when) in after_the_save.items()},
        **{f"fail_in_{place}": (owner, name, fail, when) for place, (owner, name, when) in after_the_save.items()},
    }


def inject(fault: str) -> None:
    from gpt2_repro.training import saving

    if fault in OF_WRITER:
        saving.WRITER = WRITER
    else:
        patch(*faults_of_trainer()[fault])


if __name__ == "__main__":
    import gpt2_repro.training.run as run_module

    original_fit = run_module.fit
    run_module.fit = lambda *args: (inject(os.environ["FAULT"]), original_fit(*args))[1]
    cli.run(train.main)

"""Run train.py with an injected fault, in the training process, its writer or its copier.

Environment variables:
    FAULT: name of the fault.
    FAULT_AT: step or range of steps, for example 3 or 3-8.
    FAULT_RANK: rank of the process with the fault.
    FAULT_MARK: path of a file that is created when the fault happens.
"""

import errno
import math
import os
import pkgutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import train
from gpt2_repro import cli
from gpt2_repro.checkpoints import copying, writer


FIRST, _, LAST = os.environ["FAULT_AT"].partition("-")
STEPS = range(int(FIRST), int(LAST or FIRST) + 1)
WRITER = "import sys; from tests.faults.faulty_train import serve; serve(int(sys.argv[1]))"
COPIER = "import sys; from tests.faults.faulty_train import serve_copies; serve_copies(sys.argv[1])"


def patch(place: str, replacement: Callable[..., Any], when: Callable[..., bool]) -> None:
    """Replace a function on rank FAULT_RANK for arguments for which `when` is true."""
    owner, _, name = place.rpartition(".")
    owner = pkgutil.resolve_name(f"gpt2_repro.{owner}")
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


def is_saved(*args: Any, **kwargs: Any) -> bool:
    run = Path(sys.argv[sys.argv.index("--output_dir") + 1])
    return any((folder / f"checkpoint-{step}").is_dir() for folder in (run / "staging", run) for step in STEPS)


def is_shard(path: Path, *args: Any) -> bool:
    return "optim" in path.name and saves(path)


def is_shard_of_copy(self: Any, path: Path, name: str) -> bool:
    return "optim" in path.name and saves(name)


def is_manifest(self: Any, path: Path, name: str) -> bool:
    return path.name == "manifest.json" and saves(name)


def is_complete_copy(self: Any, name: str) -> bool:
    return bool(self.manifest(name))


def deletes(path: Path, **kwargs: Any) -> bool:
    return path.name.startswith("trash-") and path.exists()


def ends_at(self: Any, args: Any, state: Any, *_: Any, **kwargs: Any) -> bool:
    return state.global_step in STEPS


def at_step(self: Any, *args: Any, **kwargs: Any) -> bool:
    return self.state.global_step + 1 in STEPS


def in_thread(*args: Any, **kwargs: Any) -> bool:
    return threading.current_thread() is not threading.main_thread()


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


def halve(original: Callable[[], Any], self: Any, path: Path, name: str) -> None:
    content, target = path.read_bytes(), f"{self.root}/{name}{'.partial' if self.is_local else ''}"
    self.fs.makedirs(target.rpartition("/")[0], exist_ok=True)
    self.fs.pipe_file(target, content[: len(content) // 2])
    kill_both(original)


def tear_copy(original: Callable[[], Any], self: Any, name: str) -> None:
    self.fs.rm_file(f"{self.root}/{name}/manifest.json")
    kill_both(original)


def halve_restore(original: Callable[[], Any], self: Any, name: str, path: Path) -> None:
    original()
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    kill(original)


kill, kill_trainer, kill_both = signals(os.getpid), signals(os.getppid), signals(os.getppid, os.getpid)
# The place of a function, its replacement, and the condition for the arguments of a call.
Fault = tuple[str, Callable[..., Any], Callable[..., bool]]
OF_WRITER: dict[str, Fault] = {
    "kill_before_a_shard": ("checkpoints.writer._write_file", kill, is_shard),
    "kill_before_the_manifest": ("checkpoints.writer.seal", kill, saves),
    "kill_before_the_rename": ("checkpoints.writer.publish", kill, saves),
    "read_only": ("checkpoints.writer._write_file", refuse, saves),
    "slow_disk": ("checkpoints.writer.HashedFile.write", waits(8), always),
    "slow_shards": ("checkpoints.writer._write_file", waits(600), is_shard),
    "stuck_disk": ("checkpoints.writer.HashedFile.write", waits(3600), always),
    "kill_in_rotation": ("checkpoints.rotation.shutil.rmtree", tear, deletes),
    "term_while_saving": ("checkpoints.writer.publish", signals(os.getppid, number=signal.SIGTERM), saves),
    "kill_trainer_before_a_shard": ("checkpoints.writer._write_file", kill_trainer, is_shard),
    "kill_trainer_before_the_manifest": ("checkpoints.writer.seal", kill_trainer, saves),
    "kill_both_before_a_shard": ("checkpoints.writer._write_file", kill_both, is_shard),
    "kill_both_before_the_rename": ("checkpoints.writer.publish", kill_both, saves),
}
OF_COPIER: dict[str, Fault] = {
    "kill_before_the_copy": ("checkpoints.copying.copy", kill_both, lambda place, run, name, *_: saves(name)),
    "kill_in_a_file": ("checkpoints.place.Place.put", halve, is_shard_of_copy),
    "kill_before_the_copied_manifest": ("checkpoints.place.Place.put", kill_both, is_manifest),
    "kill_in_the_rotation_of_copies": ("checkpoints.place.Place.remove", tear_copy, is_complete_copy),
    "slow_copy": ("checkpoints.place.Place.put", waits(0.1), always),
    "stuck_copy": ("checkpoints.place.Place.put", waits(3600), is_manifest),
}
OF_RESTORE: dict[str, Fault] = {
    "kill_in_a_restored_file": ("checkpoints.place.Place.get", halve_restore, saves),
    "kill_before_the_restored_checkpoint": ("checkpoints.restoring.publish", kill, saves),
}
AFTER_THE_SAVE: dict[str, tuple[str, Callable[..., bool]]] = {
    "validation": ("training.validation.Validation.measure", lambda *_, step, **__: step in STEPS),
    "hellaswag": ("evaluation.hellaswag._collate", is_saved),
    "sampling": ("training.samples.TextSampler._sample", lambda self, args, step, *_, **__: step in STEPS),
    "tracking": ("training.samples.TextSampler.on_log", ends_at),  # guarded like the callback of wandb
}
TRAINER = "training.trainer.PretrainingTrainer"
OF_TRAINER: dict[str, Fault] = {
    "kill_after_the_model": (f"{TRAINER}._save_optimizer", kill, lambda _, files: saves(files.folder)),
    "fail_after_the_end": ("checkpoints.saving.CheckpointSaver.finish_copies", fail, always),
    "no_foresight": ("checkpoints.saving.CheckpointSaver._missing", lambda *_, **__: 0.0, always),
    "flipped_bit": ("training.when.StepControl.on_step_end", flip, ends_at),
    "nan": (f"{TRAINER}.compute_loss", lambda original, *_, **__: original() * math.nan, at_step),
    "slow_memory": ("checkpoints.staged_saves.torch.Tensor.copy_", waits(0.02), in_thread),
    "hang": (f"{TRAINER}.compute_loss", waits(3600), at_step),
    "small_device": (f"{TRAINER}.training_step", fail, lambda self, model, inputs, *_: len(inputs["input_ids"]) > 1),
    "slow_validation": ("training.progress.ProgressBar.on_prediction_step", waits(0.5), always),
    **{f"kill_in_{name}": (place, kill, when) for name, (place, when) in AFTER_THE_SAVE.items()},
    **{f"fail_in_{name}": (place, fail, when) for name, (place, when) in AFTER_THE_SAVE.items()},
}


def serve(descriptor: int) -> None:
    """Run the process that writes checkpoints, with the fault if it is one of the writer."""
    writer.PATIENCE = 3.0  # most faults kill ranks, and nothing is to be learned from a longer wait for them
    if os.environ["FAULT"] in OF_WRITER:
        patch(*OF_WRITER[os.environ["FAULT"]])
    writer.serve(descriptor)


def serve_copies(place: str) -> None:
    """Run the process that copies checkpoints, with the fault."""
    patch(*OF_COPIER[os.environ["FAULT"]])
    copying.serve(place)


def inject(fault: str) -> None:
    from gpt2_repro.checkpoints import saving

    saving.WRITER = WRITER
    if fault in OF_COPIER:
        copying.COPIER = COPIER
    elif fault in OF_TRAINER:
        patch(*OF_TRAINER[fault])


if __name__ == "__main__":
    import gpt2_repro.training.run as life

    if os.environ["FAULT"] in OF_RESTORE:  # before the run starts
        patch(*OF_RESTORE[os.environ["FAULT"]])

    lifecycle = life.lifecycle
    life.lifecycle = lambda *args: (inject(os.environ["FAULT"]), lifecycle(*args))[1]
    cli.run(train.main)

"""Inject faults into the process that writes checkpoints.

tests/faults/faulty_train.py explains the environment variables.
"""

import errno
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpt2_repro.run_record import checkpoints, writer


FIRST, _, LAST = os.environ["FAULT_AT"].partition("-")
STEPS = range(int(FIRST), int(LAST or FIRST) + 1)


def saves(*args: Any, **kwargs: Any) -> bool:
    """Return whether the arguments contain the checkpoint path of a step in FAULT_AT.

    `args` and `kwargs` are the arguments of a function that saves checkpoints.
    """
    return any(f"checkpoint-{step}" in str(value).split("/") for step in STEPS for value in args)


def kill(original: Callable[[], Any], *args: Any, **kwargs: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_trainer(original: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
    os.kill(os.getppid(), signal.SIGKILL)
    return original()


def kill_both(original: Callable[[], Any], *args: Any, **kwargs: Any) -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    kill(original)


def term(original: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
    os.kill(os.getppid(), signal.SIGTERM)
    return original()


def tear(original: Callable[[], Any], path: Path, **kwargs: Any) -> None:
    next(path.glob("*.pt")).unlink()
    kill(original)


def refuse(original: Callable[[], Any], *args: Any, **kwargs: Any) -> None:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def slow(original: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
    time.sleep(4)
    return original()


def hang(original: Callable[[], Any], *args: Any, **kwargs: Any) -> None:
    time.sleep(3600)


def is_shard(path: Path, *args: Any) -> bool:
    return "optim" in path.name and saves(path)


def deletes(path: Path, **kwargs: Any) -> bool:
    return path.name.startswith("trash-") and path.exists()


FAULTS: dict[str, tuple[Any, str, Callable[..., Any], Callable[..., bool]]] = {
    "kill_before_a_shard": (writer, "_write_file", kill, is_shard),
    "kill_before_the_manifest": (checkpoints, "seal", kill, saves),
    "kill_before_the_rename": (checkpoints, "publish", kill, saves),
    "read_only": (writer, "_write_file", refuse, saves),
    "slow_disk": (writer.HashedFile, "write", slow, lambda *_: True),
    "stuck_disk": (writer.HashedFile, "write", hang, lambda *_: True),
    "kill_in_rotation": (checkpoints.shutil, "rmtree", tear, deletes),
    "term_while_saving": (checkpoints, "publish", term, saves),
    "kill_trainer_before_a_shard": (writer, "_write_file", kill_trainer, is_shard),
    "kill_trainer_before_the_manifest": (checkpoints, "seal", kill_trainer, saves),
    "kill_both_before_a_shard": (writer, "_write_file", kill_both, is_shard),
    "kill_both_before_the_rename": (checkpoints, "publish", kill_both, saves),
}


def patch(owner: Any, name: str, replacement: Callable[..., Any], when: Callable[..., bool]) -> None:
    """Replace a function on rank FAULT_RANK for arguments for which `when` is true."""
    original = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        if os.environ.get("RANK", "0") != os.environ["FAULT_RANK"] or not when(*args, **kwargs):
            return original(*args, **kwargs)
        Path(os.environ["FAULT_MARK"]).touch()
        return replacement(lambda: original(*args, **kwargs), *args, **kwargs)

    setattr(owner, name, call)


def serve(descriptor: int) -> None:
    patch(*FAULTS[os.environ["FAULT"]])
    writer.serve(descriptor)

"""train.py with a fault: FAULT names it, FAULT_AT the step(s), FAULT_RANK the rank; FAULT_MARK is written when it happens."""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


sys.path.insert(0, str(Path(__file__).parents[2]))
import torch

import train
from gpt2_repro import entry


FIRST, _, LAST = os.environ["FAULT_AT"].partition("-")
STEPS = range(int(FIRST), int(LAST or FIRST) + 1)
RANK = os.environ.get("FAULT_RANK", "0")


def here() -> bool:
    return os.environ.get("RANK", "0") == RANK


def mark() -> None:
    Path(os.environ["FAULT_MARK"]).write_text(f"{os.getpid()}")


def die(*args: Any, **kwargs: Any) -> None:
    mark()
    os.kill(os.getpid(), signal.SIGKILL)


def before(owner: Any, name: str, fault: Callable[..., None], when: Callable[..., bool]) -> None:
    """Put `fault` in front of a function, where `when` says so of its arguments."""
    original = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        if here() and when(*args, **kwargs):
            fault(*args, **kwargs)
        return original(*args, **kwargs)

    setattr(owner, name, call)


def flip(self: Any, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
    mark()
    model.transformer.wte.weight.data.view(torch.int16)[5, 7] ^= 1


def saved_step(path: Any) -> bool:
    return any(f"checkpoint-{step}" in str(path).split("/") for step in STEPS)


def inject(fault: str) -> None:
    from gpt2_repro.training import checkpoints
    from gpt2_repro.training.hashing import _HashedFile
    from gpt2_repro.training.saving import CheckpointSaver
    from gpt2_repro.training.stopping import Stopping
    from gpt2_repro.training.trainer import PretrainingTrainer

    if fault == "kill_after_the_model":
        before(PretrainingTrainer, "_save_optimizer_and_scheduler", die, lambda self, output: saved_step(output))
    elif fault == "kill_before_a_shard":
        before(_HashedFile, "__init__", die, lambda self, file: "optim_states" in file.name and saved_step(file.name))
    elif fault == "kill_before_the_manifest":
        before(checkpoints, "seal", die, lambda folder, *_, **__: saved_step(folder))
    elif fault == "kill_before_the_rename":
        before(checkpoints, "publish", die, lambda staged, target: saved_step(target))
    elif fault == "kill_in_rotation":
        deleting = lambda path, **_: str(path.name).startswith("trash-") and path.exists()  # noqa: E731
        before(checkpoints.shutil, "rmtree", lambda path, **_: (next(path.glob("*.pt")).unlink(), die()), deleting)
    elif fault == "term_while_saving":
        term = lambda *_: (mark(), os.kill(os.getpid(), signal.SIGTERM))  # noqa: E731
        before(checkpoints, "publish", term, lambda staged, target: saved_step(target))
    elif fault == "no_foresight":
        CheckpointSaver._has_room = lambda self, step, stops: mark() or True
    elif fault == "flipped_bit":
        before(Stopping, "on_step_end", flip, lambda self, args, state, control, **_: state.global_step in STEPS)
    elif fault in ("nan", "hang"):
        original = PretrainingTrainer.compute_loss

        def compute_loss(self: Any, *args: Any, **kwargs: Any) -> Any:
            loss = original(self, *args, **kwargs)
            if here() and self.state.global_step + 1 in STEPS:
                mark()
                if fault == "hang":
                    time.sleep(3600)
                loss = loss * float("nan")
            return loss

        PretrainingTrainer.compute_loss = compute_loss
    else:
        raise ValueError(f"there is no fault {fault}")


if __name__ == "__main__":
    import gpt2_repro.training.fit as fit_module

    original_fit = fit_module.fit
    fit_module.fit = lambda *args: (inject(os.environ["FAULT"]), original_fit(*args))[1]
    entry.run(train.main)

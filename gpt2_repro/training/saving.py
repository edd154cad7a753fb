"""Saving a checkpoint: room made first, files hashed as they are written, a manifest last, then its name."""

import errno
import functools
import logging
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list, gather_object

from gpt2_repro.errors import RunFailed
from gpt2_repro.training import checkpoints
from gpt2_repro.training.arguments import PretrainingArguments
from gpt2_repro.training.hashing import hashed_saves


logger = logging.getLogger(__name__)

SPARE = 1.15  # times what the last checkpoint took
SKIPS_ALLOWED = 2
VISIBLE_WITHIN = 60.0  # seconds, for a rename on another machine's file system


class CheckpointSaver:
    """Saves the checkpoints of a run. All its methods are collective: call them on all ranks.

    Args:
        run: the run directory.
        expected: bytes of the first checkpoint; later ones are measured by the one before.
        args: how many to keep.
    """

    def __init__(self, run: Path, accelerator: Any, args: PretrainingArguments, *, expected: int) -> None:
        self.run, self.accelerator, self.args, self.expected = run, accelerator, args, expected
        self.skipped = 0
        self.seconds = 0.0  # that the last one took

    @property
    def staging(self) -> Path:
        """Where transformers is to write, in place of the run directory."""
        return self.run / checkpoints.STAGING

    def save(self, step: int, write: Callable[[], None], facts: Callable[[], dict[str, Any]]) -> bool:
        """Save checkpoint-`step`, or say aloud that there is no room; returns whether it was saved.

        Args:
            write: puts the files into `staging`/checkpoint-`step`.
            facts: what the manifest says besides; called on all ranks.

        Raises RunFailed where the disk is full: where it became so while writing, or the third time in a row.
        """
        if not self._has_room(step):
            return False
        began = time.perf_counter()
        staged, target = self.staging / f"checkpoint-{step}", self.run / f"checkpoint-{step}"
        try:
            with hashed_saves(staged) as written:
                write()
                described = facts()
            files = functools.reduce(dict.__or__, gather_object([written]))
            if self.accelerator.is_main_process:
                checkpoints.seal(staged, files, **described)
                checkpoints.publish(staged, target)
        except Exception as error:
            if not _is_full(error):
                raise
            shutil.rmtree(self.staging, ignore_errors=True)
            raise RunFailed(
                f"the disk of {self.run} is full, checkpoint-{step} could not be saved: free some of it and start the "
                "same command again, it goes on from the checkpoint before"
            ) from None
        self.accelerator.wait_for_everyone()
        _wait_until_visible(target)
        self.seconds = time.perf_counter() - began
        if self.accelerator.is_main_process:
            megabytes = checkpoints.size(target) / 1e6
            logger.info("saved %s: %s MB in %.1f s", target, f"{megabytes:,.1f}", self.seconds)
            self._rotate(keep=self.args.keep_checkpoints)
        self.accelerator.wait_for_everyone()
        return True

    def _rotate(self, *, keep: int) -> None:
        args = self.args
        checkpoints.rotate(self.run, keep=keep, keep_every=args.keep_every_steps, keep_best=args.keep_best_checkpoint)

    def _has_room(self, step: int) -> bool:
        missing = [self._make_room() if self.accelerator.is_main_process else 0.0]
        (megabytes,) = broadcast_object_list(missing)
        if megabytes <= 0:
            self.skipped = 0
            return True
        self.skipped += 1
        if self.skipped > SKIPS_ALLOWED:
            raise RunFailed(
                f"{megabytes:,.1f} MB are missing on the disk of {self.run} for a checkpoint, three times in a row: "
                "free them and start the same command again"
            )
        logger.error(
            "NOT SAVED at step %d: %.1f MB are missing on the disk of %s; free them: the run ends when this happens "
            "%d times in a row",
            step,
            megabytes,
            self.run,
            SKIPS_ALLOWED + 1,
        )
        return False

    def _make_room(self) -> float:
        """Megabytes that are missing for one more checkpoint, after older ones have gone that rotation would delete."""
        checkpoints.sweep(self.run)
        complete = checkpoints.complete_checkpoints(self.run)
        needed = SPARE * (checkpoints.size(complete[0]) if complete else self.expected)
        if shutil.disk_usage(self.run).free < needed:
            self._rotate(keep=min(1, self.args.keep_checkpoints))
            if gone := len(complete) - len(checkpoints.complete_checkpoints(self.run)):
                logger.warning("deleted %d older checkpoints to make room for the next", gone)
        return (needed - shutil.disk_usage(self.run).free) / 1e6


def _is_full(error: BaseException) -> bool:
    # safetensors raises an error of its own that has the system's words alone.
    return getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "os error 28" in str(error)


def _wait_until_visible(folder: Path) -> None:
    """A rename on a network file system takes time to be seen elsewhere. Raises TimeoutError after a minute."""
    deadline = time.monotonic() + VISIBLE_WITHIN
    while not (folder / checkpoints.MANIFEST).is_file():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{folder} was saved and cannot be seen from here after {VISIBLE_WITHIN:.0f} s")
        time.sleep(0.05)

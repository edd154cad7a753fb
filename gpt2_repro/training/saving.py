"""Save a checkpoint: make room, write and hash in staging/, seal with a manifest, rename, delete old ones."""

import contextlib
import errno
import functools
import logging
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list, gather_object

from gpt2_repro.errors import RunFailed
from gpt2_repro.run_record import checkpoints
from gpt2_repro.run_record.layout import STAGING, checkpoint_path
from gpt2_repro.training.arguments import PretrainingArguments
from gpt2_repro.training.hashing import hashed_saves


logger = logging.getLogger(__name__)

SPARE = 1.15  # required free space as a multiple of the last checkpoint's size
SKIPS_ALLOWED = 2
VISIBLE_WITHIN = 60.0  # seconds until a rename on another machine must be visible here


class CheckpointSaver:
    """Saves the checkpoints of a run. All its methods are collective: call them on all ranks.

    Args:
        run: the run directory.
        args: which checkpoints to keep.
        expected: bytes of the first checkpoint; later saves use the previous size.
        alive: called after each part of a save, because parts can take long.
    """

    def __init__(
        self, run: Path, accelerator: Any, args: PretrainingArguments, *, expected: int, alive: Callable[[], None]
    ) -> None:
        self.run, self.accelerator, self.args = run, accelerator, args
        self.expected, self.alive = expected, alive
        self.skipped = 0
        self.seconds = 0.0  # duration of the last save

    @property
    def staging(self) -> Path:
        """The folder that transformers writes to, instead of the run directory."""
        return self.run / STAGING

    def save(
        self, step: int, write: Callable[[], None], facts: Callable[[], dict[str, Any]], *, stops: str | None = None
    ) -> bool:
        """Save checkpoint-`step`. If space is short, log an error and return False.

        Args:
            write: writes the files into `staging`/checkpoint-`step`.
            facts: returns further entries of the manifest; called on all ranks.
            stops: the reason if the run stops before its last step, or None.

        Raises RunFailed if the disk becomes full while writing, if space is short the third time in a row, or if the
        run stops and space is short.
        """
        if not self._make_room_or_skip(step, stops):
            return False
        began = time.perf_counter()
        staged, target = (checkpoint_path(folder, step) for folder in (self.staging, self.run))
        with full_disk_in_words(self.run, target.name, self.staging):
            with hashed_saves(staged) as written:
                write()
                described = facts()
            self.alive()
            files = functools.reduce(dict.__or__, gather_object([written]))
            if self.accelerator.is_main_process:
                checkpoints.seal(staged, files, **described)
                checkpoints.publish(staged, target)
        self.alive()
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

    def _make_room_or_skip(self, step: int, stops: str | None) -> bool:
        missing = [self._free_space() if self.accelerator.is_main_process else 0.0]
        (megabytes,) = broadcast_object_list(missing)
        if megabytes <= 0:
            self.skipped = 0
            return True
        self.skipped += 1
        if stops or self.skipped > SKIPS_ALLOWED:
            why = f"and the run stops: {stops}" if stops else "three times in a row"
            raise RunFailed(
                f"{megabytes:,.1f} MB are missing on the disk of {self.run} for a checkpoint, {why}. Free them and run "
                "the same command again; it continues from the newest checkpoint."
            )
        logger.error(
            "NOT SAVED at step %d: %.1f MB are missing on the disk of %s. Free them; the run ends if this happens "
            "%d times in a row.",
            step,
            megabytes,
            self.run,
            SKIPS_ALLOWED + 1,
        )
        return False

    def _free_space(self) -> float:
        """Delete old checkpoints if space is short. Returns the megabytes that are still missing, 0 or less for none."""
        checkpoints.sweep(self.run)
        complete = checkpoints.complete_checkpoints(self.run)
        needed = SPARE * (checkpoints.size(complete[0]) if complete else self.expected)
        if shutil.disk_usage(self.run).free < needed:
            self._rotate(keep=min(1, self.args.keep_checkpoints))
            if gone := len(complete) - len(checkpoints.complete_checkpoints(self.run)):
                logger.warning("deleted %d older checkpoints to make room for the next", gone)
        return (needed - shutil.disk_usage(self.run).free) / 1e6


@contextlib.contextmanager
def full_disk_in_words(run: Path, name: str, staging: Path) -> Iterator[None]:
    """Turn a full-disk error into RunFailed, after deleting the staging folder."""
    try:
        yield
    except Exception as error:
        # safetensors' own error has no errno; only its text says "os error 28".
        if getattr(error, "errno", None) not in (errno.ENOSPC, errno.EDQUOT) and "os error 28" not in str(error):
            raise
        shutil.rmtree(staging, ignore_errors=True)
        raise RunFailed(
            f"The disk of {run} is full, so {name} could not be saved. Free some space and run the same command again; "
            "it continues from the newest checkpoint."
        ) from None


def _wait_until_visible(folder: Path) -> None:
    """Wait until a renamed folder on a network file system is visible here. Raises TimeoutError after a minute."""
    deadline = time.monotonic() + VISIBLE_WITHIN
    while not (folder / checkpoints.MANIFEST).is_file():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{folder} was saved and cannot be seen from here after {VISIBLE_WITHIN:.0f} s")
        time.sleep(0.05)

"""Save checkpoints atomically, and delete old checkpoints."""

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

SPARE = 1.15  # required free space, as a multiple of the size of the last checkpoint
SKIPS_ALLOWED = 2  # saves in a row that may be skipped for lack of space
VISIBLE_WITHIN = 60.0  # seconds until a rename on another machine must be visible on this one


class CheckpointSaver:
    """Saves the checkpoints of a run, and deletes old checkpoints.

    Args:
        expected: estimated size of the first checkpoint in bytes.
        alive: called during a save, to restart the watchdog's timer. Otherwise a long save may be mistaken for a hang.
    """

    def __init__(
        self, run: Path, accelerator: Any, args: PretrainingArguments, *, expected: int, alive: Callable[[], None]
    ) -> None:
        self.run, self.accelerator, self.args = run, accelerator, args
        self.expected, self.alive = expected, alive
        self.skipped = 0
        self.saved_step = -1  # of the newest checkpoint
        self.seconds = 0.0  # duration of the last save

    @property
    def staging(self) -> Path:
        """The folder in which checkpoints are written before they are complete."""
        return self.run / STAGING

    def save(
        self, step: int, write: Callable[[], None], facts: Callable[[], dict[str, Any]], *, stops: str | None = None
    ) -> bool:
        """Save checkpoint-`step`. Return False if the disk has too little space.

        This is a collective: call it on all ranks.

        Args:
            write: writes the files of the checkpoint into `staging`/checkpoint-`step`.
            facts: returns all entries of the manifest except the list of files. Called on all ranks.
            stops: why the run stops early after this save, or None if it does not stop early.

        Raises RunFailed if the disk becomes full while writing. Also raises RunFailed if the disk has too little space
        for the third save in a row, or for the save with which the run stops.
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
        self.saved_step, self.seconds = step, time.perf_counter() - began
        if self.accelerator.is_main_process:
            megabytes = checkpoints.size(target) / 1e6
            logger.info("saved %s: %s MB in %.1f s", target, f"{megabytes:,.1f}", self.seconds)
            self.rotate()
        self.accelerator.wait_for_everyone()
        return True

    def rotate(self, *, at_most: int | None = None) -> None:
        """Delete checkpoints that the recipe does not keep. Call this on rank 0 only.

        Args:
            at_most: keep no more than this number of newest checkpoints.
        """
        args = self.args
        keep = args.keep_checkpoints if at_most is None else min(at_most, args.keep_checkpoints)
        checkpoints.rotate(self.run, keep=keep, keep_every=args.keep_every_steps, keep_best=args.keep_best_checkpoint)

    def _make_room_or_skip(self, step: int, stops: str | None) -> bool:
        missing = [self._free_space() if self.accelerator.is_main_process else 0.0]
        (megabytes,) = broadcast_object_list(missing)
        if megabytes <= 0:
            self.skipped = 0
            return True
        self.skipped += 1
        if stops or self.skipped > SKIPS_ALLOWED:
            why = f"when the run stopped ({stops})" if stops else "for the third save in a row"
            raise RunFailed(
                f"{self.run} needed {megabytes:,.1f} MB more free disk space {why}. Free disk space and run the same "
                "command again to continue from the newest checkpoint."
            )
        logger.error(
            "NOT SAVED: the checkpoint of step %d needs %.1f MB more disk space in %s. Training continues. Delete "
            "files: the run ends if %d saves in a row fail.",
            step,
            megabytes,
            self.run,
            SKIPS_ALLOWED + 1,
        )
        return False

    def _free_space(self) -> float:
        """Delete old checkpoints if the disk has too little space for the next checkpoint.

        Returns the megabytes that are still missing. If there is enough space, the result is 0 or negative.
        """
        checkpoints.sweep(self.run)
        complete = checkpoints.complete_checkpoints(self.run)
        needed = SPARE * (checkpoints.size(complete[0]) if complete else self.expected)
        if shutil.disk_usage(self.run).free < needed:
            self.rotate(at_most=1)
            if gone := len(complete) - len(checkpoints.complete_checkpoints(self.run)):
                logger.warning("deleted %d older checkpoints to free disk space for the next one", gone)
        return (needed - shutil.disk_usage(self.run).free) / 1e6


@contextlib.contextmanager
def full_disk_in_words(run: Path, name: str, staging: Path) -> Iterator[None]:
    """Raise RunFailed with a short message if the `with` block fills the disk.

    Args:
        name: the name of the checkpoint or of the final model, for the message.
        staging: the folder into which the `with` block writes. If the disk is full, this folder is deleted.
    """
    try:
        yield
    except Exception as error:
        # The error of safetensors has no errno. Only its text contains "os error 28".
        if getattr(error, "errno", None) not in (errno.ENOSPC, errno.EDQUOT) and "os error 28" not in str(error):
            raise
        shutil.rmtree(staging, ignore_errors=True)
        raise RunFailed(
            f"The disk of {run} is full, so {name} could not be saved. Free some space and run the same command "
            "again to continue from the newest checkpoint."
        ) from None


def _wait_until_visible(folder: Path) -> None:
    """Wait until a rename to `folder` by another machine is visible on this machine."""
    deadline = time.monotonic() + VISIBLE_WITHIN
    while not (folder / checkpoints.MANIFEST).is_file():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{folder} was saved but is not visible on this machine after {VISIBLE_WITHIN:.0f} s.")
        time.sleep(0.05)

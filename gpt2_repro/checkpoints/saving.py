"""Save checkpoints atomically while training continues, and rotate them."""

import contextlib
import dataclasses
import enum
import functools
import logging
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from gpt2_repro import ranks
from gpt2_repro.checkpoints.copying import RunCopier
from gpt2_repro.checkpoints.manifest import checkpoint_size
from gpt2_repro.checkpoints.resuming import RunIdentity
from gpt2_repro.checkpoints.rotation import (
    DISK_FAULTS,
    complete_checkpoints,
    disk_faults_in_words,
    expendable,
    leftovers,
    newest_checkpoint,
    rotate,
    sweep,
    to_continue,
)
from gpt2_repro.checkpoints.side_process import SideProcess
from gpt2_repro.checkpoints.staged_saves import StagingMemory
from gpt2_repro.checkpoints.writer import Done, Job, Save, perform
from gpt2_repro.errors import RunFailed, UserError
from gpt2_repro.files import growth, size_of
from gpt2_repro.hardware import available_memory
from gpt2_repro.run_record import RunRecord
from gpt2_repro.run_record.environment import Environment
from gpt2_repro.run_record.layout import CHECKPOINT_MANIFEST, STAGING, Rotation, checkpoint_path, step_of
from gpt2_repro.text import size as size_text


logger = logging.getLogger(__name__)

WRITER = "import sys; from gpt2_repro.checkpoints import writer; writer.serve(int(sys.argv[1]))"
SPARE = 1.15  # required free space, as a multiple of the size of the last checkpoint
SKIPS_ALLOWED = 2  # saves in a row that may be skipped for lack of space
StageFiles = Callable[[Path], tuple[dict[str, dict[str, Any]], dict[str, Any]]]


class WriterState(enum.IntEnum):
    """What the writer of a rank does. The largest state of all ranks counts."""

    FINISHED = 0
    WAITS = 1
    PROGRESSES = 2


@dataclasses.dataclass(frozen=True)
class SavingSettings:
    """How a run saves and copies its checkpoints."""

    rotation: Rotation
    in_background: bool = True
    sync_to: str = ""
    identity: RunIdentity = RunIdentity({})


class CheckpointSaver:
    """Saves the checkpoints of a run, and deletes old checkpoints.

    While training continues, the checkpoint is copied to memory, and then a process writes the copy to disk.

    Args:
        settings: how to save.
        device: the type of the device, for example `cuda`.
        total_bytes: expected size of the first checkpoint.
        own_bytes: expected size of the files of this rank.
        alive: a function that restarts the watchdog's timer. It is called as long as a save makes progress.
        prepare: a function that does the one-time set-up for saving. It is called in a thread after the first step.
    """

    def __init__(
        self,
        run: RunRecord,
        settings: SavingSettings,
        *,
        device: str,
        total_bytes: int,
        own_bytes: int,
        alive: Callable[[], None],
        prepare: Callable[[], None],
    ) -> None:
        self.run = run
        self.run_directory = run.path
        self.settings = settings
        self.device = device
        self.staging = self.run_directory / STAGING  # where checkpoints are written before they are complete
        self.total_bytes = total_bytes
        self.own_bytes = own_bytes
        self.alive = alive
        self.prepare = prepare
        self.skipped = 0
        self.signs = 0  # of progress, from the writer
        self.is_warm = False  # whether the first step has ended
        self.saved_step = -1  # of the newest checkpoint that is being copied to memory or written, or is complete
        self.seconds = 0.0  # duration of the last save
        self.paused = 0.0  # how long training waited for it
        self.jobs: list[Job] = []  # not finished yet
        self._completed: list[int] = []
        self.memory: StagingMemory | None = None
        self.writer: SideProcess | None = None
        self.copier: RunCopier | None = None  # on rank 0, with --sync_to

    def check_disk(self, *, resumes_at: int | None = None) -> None:
        """Raise UserError if the disk has too little space for a checkpoint. Nothing is deleted.

        This is a collective: call it on all ranks.

        Args:
            resumes_at: the step at which the run starts. Later checkpoints stay, under another name.
        """
        missing = self._missing(deletes=False, resumes_at=resumes_at)
        if missing > 0:
            fix = "Free disk space or pass another --output_dir."
            raise UserError(f"A checkpoint needs {size_text(missing)} more disk space in {self.run_directory}. {fix}")

    def _needed(self) -> float:
        """Return the free space in bytes that the next checkpoint needs."""
        newest = newest_checkpoint(self.run_directory)
        expected = 0
        if newest is not None:
            expected = checkpoint_size(newest)
        if expected == 0:  # the first checkpoint, or another process has moved the newest one meanwhile
            expected = self.total_bytes
        return SPARE * expected

    def _reclaimable(self, resumes_at: int | None) -> int:
        """Return the bytes that the first save would free: unfinished saves, and older checkpoints."""
        size = sum(size_of(folder) for folder in leftovers(self.run_directory))
        for path in expendable(self.run_directory, self._fewest):
            if resumes_at is None or step_of(path) <= resumes_at:
                size += checkpoint_size(path)
        return size

    @property
    def _fewest(self) -> Rotation:
        """The rotation that frees most disk space."""
        return self.settings.rotation._replace(keep=min(1, self.settings.rotation.keep))

    def start(self, environment: Environment, *, is_new: bool) -> None:
        """Start the processes that write checkpoints and, on rank 0 with --sync_to, copy them.

        This is a collective. Without --background_save, or with too little memory, training pauses during saves.

        Args:
            environment: its run identity names the owner of the copies.
            is_new: whether the run starts at step 0. It then fails if its log cannot be copied.

        Raises RunFailed if memory is missing, or if the first copy of a new run fails.
        """
        if self.settings.in_background and hasattr(os, "memfd_create"):
            self._start_writer()
        if self.settings.sync_to and ranks.is_main():
            self.run.write_environment(environment)  # the copy needs the run identity
            self.copier = RunCopier(self.run, self.settings.sync_to, self.settings.rotation, self.settings.identity)
        if self.settings.sync_to and is_new:
            ranks.decide(self._require_place)

    def _require_place(self) -> None:
        """Copy the log of a new run, on rank 0."""
        if self.copier is not None:
            self.copier.require_place()

    def resume_at(self, step: int) -> None:
        """Note that the checkpoint of `step` is complete."""
        self.saved_step = step

    def _start_writer(self) -> None:
        """Allocate memory for this rank's files, and start the process that writes them. A collective."""
        copies = ranks.sum_on_machine(self.own_bytes)
        available = available_memory()
        needed = copies
        if self.device != "cuda":
            # Without a GPU with its own memory: the moments, gradients and activations are not allocated yet.
            needed = 3 * copies
        if ranks.largest(int(needed > available)):
            text = "Saving in the background needs %s of free memory, but there are %s. Training pauses during saves."
            logger.warning(text, size_text(needed), size_text(available))
            return
        self.memory = StagingMemory(self.own_bytes)
        logger.info("checkpoints are copied to memory (%s) and then written in the background", size_text(copies))
        descriptors = [self.memory.descriptor]
        if self.run.lock_descriptor >= 0:
            descriptors.append(self.run.lock_descriptor)  # the process also holds the lock
        self.writer = SideProcess(WRITER, self.memory.descriptor, descriptors=descriptors)

    def save(self, step: int, write: StageFiles, *, stops: str | None = None, rolling: bool = False) -> bool:
        """Save checkpoint-`step`. Return False if the disk has too little space.

        This is a collective: call it on all ranks. If a process writes in the background, this method returns before
        the tensors are copied: call `wait_until_staged` before they change. Without this process, or if `stops` is not
        None, it returns when the checkpoint is complete.

        Args:
            write: a function that writes a checkpoint into a folder or `memory`. It is called on all ranks, and
                returns the files of the rank and all other entries of the manifest.
            stops: why the run stops early after this save, or None if it does not stop early.
            rolling: whether the next checkpoint replaces this checkpoint.

        Raises RunFailed if this checkpoint or the previous one cannot be written. Also raises RunFailed if the disk has
        too little space for the third save in a row, or for the save with which the run stops.
        """
        began = time.perf_counter()
        self.wait_for_writers()  # Direct callers may not have waited; the memory holds one save.
        if not self._make_room_or_skip(step, stops, rolling=rolling):
            return False
        self.saved_step = step
        staged = checkpoint_path(self.staging, step)
        target = checkpoint_path(self.run_directory, step)
        with disk_faults_in_words(self.run_directory, target.name, self.staging):
            files, facts = write(staged)
            if rolling:
                facts["rolling"] = True
            self.paused = time.perf_counter() - began
            self._submit(Save(str(staged.resolve()), str(target.resolve()), files, facts))
            if self.writer is not None:
                self.paused = time.perf_counter() - began
        if stops or self.writer is None:
            self.finish()
        return True

    def poll(self, *, seconds: float | None = 0.0) -> None:
        """Log the saves that this rank's writer has finished, and continue to copy them to --sync_to.

        Args:
            seconds: how long to wait for a sign of the writer. None: wait until it has finished all saves.

        Raises RunFailed if the writer has failed.
        """
        if not self.is_warm:
            threading.Thread(target=self.prepare, daemon=True).start()
            self.is_warm = True
        self.wait_until_staged()
        while self.jobs and self.writer is not None:
            reply = self.writer.reply(seconds)
            if reply is None:
                break
            if not reply:  # the writer makes progress
                self.signs += 1
                self.alive()
                continue
            if "error" in reply:
                self._fail(reply)
            self._report(self.jobs.pop(0), Done(**reply))
        if self.copier and self.copier.poll() and not self.jobs:
            self.rotate()  # the checkpoint was kept while it was copied

    def _fail(self, reply: dict[str, Any]) -> NoReturn:
        """Raise RunFailed for a writer that has failed."""
        name = checkpoint_path(self.run_directory, self.saved_step).name
        with disk_faults_in_words(self.run_directory, name, self.staging):
            if reply.get("errno") in DISK_FAULTS:
                raise OSError(reply["errno"], reply["error"])
        shutil.rmtree(self.staging, ignore_errors=True)  # ends the writers of the other ranks
        raise RunFailed(f"{name} could not be saved: {reply['error']}. Run the same command again.")

    def take_completed(self) -> list[int]:
        """Return the steps of the checkpoints that were completed since the last call. On ranks above 0: []."""
        completed = self._completed
        self._completed = []
        return completed

    def wait_until_staged(self, *_: Any) -> None:
        """Wait until the last save is copied to memory. Call this before weights or states of the optimizer change."""
        if self.memory is not None and self.jobs:
            began = time.perf_counter()
            self.memory.wait()
            self.paused += time.perf_counter() - began

    def finish(self) -> None:
        """Wait until the last save is complete on all ranks. Call this on all ranks."""
        self.wait_for_writers()
        if self.saved_step >= 0:
            manifest = checkpoint_path(self.run_directory, self.saved_step) / CHECKPOINT_MANIFEST
            self.wait_until(manifest.is_file)
        ranks.wait()

    def wait_for_writers(self) -> None:
        """Wait until the writers of all ranks have finished. A collective.

        As long as one writer makes progress, the watchdogs of all ranks are restarted.
        """
        state = WriterState.PROGRESSES
        while state != WriterState.FINISHED:
            before = self.signs
            self.poll(seconds=1.0)
            own = WriterState.WAITS if self.jobs else WriterState.FINISHED
            if self.signs > before:
                own = WriterState.PROGRESSES
            state = WriterState(ranks.largest(own))
            if state == WriterState.PROGRESSES:
                self.alive()

    def wait_until(self, is_complete: Callable[[], bool]) -> None:
        """Wait until this machine sees a folder that rank 0 completes. While files grow, restart the watchdog."""
        grows = growth(self.staging)
        while not is_complete():
            if grows():
                self.alive()
            time.sleep(0.05)

    def close(self) -> None:
        """Tell the writer process to exit when its last save is complete."""
        if self.writer is not None:
            with contextlib.suppress(Exception):  # the run has ended with it, or with another error
                self.wait_until_staged()
            self.writer.end()
            if not self.jobs:
                self.writer.process.wait()

    def finish_copies(self) -> None:
        """Wait until the run is copied to --sync_to. Call this on all ranks."""
        if self.copier:
            for _ in self.copier.finish():
                ranks.largest(1)  # the other ranks continue to wait
                self.alive()
            ranks.largest(0)
            self.rotate()
            self.poll(seconds=None)
        elif self.settings.sync_to:
            while ranks.largest(0):
                self.alive()

    def require_copied(self) -> None:
        """Raise RunFailed if the last copy to --sync_to has failed."""
        if self.copier:
            self.copier.require_copied()

    def copy_rest(self, seconds: float) -> None:
        """Copy what a run has saved before it failed, for at most `seconds`. Does nothing without --sync_to."""
        if self.copier is None:
            return
        deadline = time.monotonic() + seconds
        if self.writer is not None:  # it completes the last checkpoint
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.writer.process.wait(seconds / 2)
        for _ in self.copier.finish():
            if time.monotonic() > deadline:
                break

    def rotate(self) -> None:
        """Delete checkpoints that the recipe does not keep. Call this on rank 0 only."""
        self._submit(None)

    def _submit(self, save: Save | None) -> None:
        """Write a checkpoint, if `save` is not None, and then delete old checkpoints."""
        copied = -1  # the step of the checkpoint that is being copied, which stays
        if self.copier is not None and self.copier.job:
            copied = step_of(Path(self.copier.job))
        job = Job(
            run_directory=str(self.run_directory.resolve()),
            rotation=self.settings.rotation,
            also=copied,
            trainer=os.getpid(),
            rank=ranks.index(),
            ranks=ranks.count(),
            save=save,
        )
        if self.writer is None or self.memory is None:
            self._report(job, perform(job, memoryview(b""), self.alive))
        else:
            self.wait_until_staged()
            self.jobs.append(job)
            self.memory.begin(functools.partial(self.writer.submit, job.to_json()))

    def _report(self, job: Job, done: Done) -> None:
        """Log a checkpoint that is complete, and continue with its copy. Does nothing on ranks above 0."""
        if job.save is None or job.rank:
            return
        if self.copier:
            self.copier.requeue()
        self.seconds = self.paused + done.seconds
        if self.writer is None:
            self.paused = self.seconds
        target = checkpoint_path(self.run_directory, self.saved_step)
        self._completed.append(self.saved_step)
        text = "saved %s: %s MB in %.1f s, training paused for %.2f s"
        logger.info(text, target, f"{done.bytes / 1e6:,.1f}", self.seconds, self.paused)

    def _make_room_or_skip(self, step: int, stops: str | None, *, rolling: bool) -> bool:
        """Return whether there is space for a checkpoint, after old ones were deleted. A collective."""
        missing = self._missing(rolling=rolling)
        if missing <= 0:
            self.skipped = 0
            return True
        if rolling:
            logger.warning("The disk has too little space for the rolling checkpoint of step %d.", step)
            return False
        self.skipped += 1
        if stops or self.skipped > SKIPS_ALLOWED:
            why = "For the third save in a row,"
            if stops:
                why = f"When the run stopped ({stops}),"
            fix = f"Free it and run the same command again {to_continue(self.run_directory)}."
            raise RunFailed(f"{why} the disk of {self.run_directory} had {size_text(missing)} too little space. {fix}")
        text = "NOT SAVED: the checkpoint of step %d needs %s more disk space in %s. After %d such saves the run ends."
        logger.error(text, step, size_text(missing), self.run_directory, SKIPS_ALLOWED + 1)
        return False

    def _missing(self, *, rolling: bool = False, deletes: bool = True, resumes_at: int | None = None) -> float:
        """Return the bytes that the next checkpoint lacks on the disk, or at most 0. A collective.

        Args:
            rolling: whether the checkpoint is rolling. For such a one, no other checkpoint is deleted.
            deletes: whether old checkpoints are deleted now. Otherwise, their space counts as free.
            resumes_at: see `check_disk`.
        """
        missing = 0.0
        if ranks.is_main():
            reclaimable = 0
            if deletes:
                self._make_room(rolling=rolling)
            else:
                reclaimable = self._reclaimable(resumes_at)
            missing = self._needed() - shutil.disk_usage(self.run_directory).free - reclaimable
        return ranks.of_main(missing)

    def _make_room(self, *, rolling: bool) -> None:
        """Delete what a killed run left, and old checkpoints if the disk has too little space."""
        sweep(self.run_directory)
        if rolling or shutil.disk_usage(self.run_directory).free >= self._needed():
            return
        before = len(complete_checkpoints(self.run_directory))
        rotate(self.run_directory, self._fewest)
        deleted = before - len(complete_checkpoints(self.run_directory))
        if deleted:
            logger.warning("deleted %d older checkpoints to free disk space for the next one", deleted)

"""Write the files of a checkpoint to disk, and its manifest last.

This runs in the training process, or in a separate process while training continues.
"""

import dataclasses
import hashlib
import json
import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from gpt2_repro.checkpoints import side_process
from gpt2_repro.checkpoints.manifest import seal
from gpt2_repro.checkpoints.rotation import delete_tree, publish, rotate
from gpt2_repro.files import growth, read_object, write_whole
from gpt2_repro.run_record.layout import Rotation


PATIENCE = 30.0  # seconds that the writer of a dead trainer waits for the writers of other ranks without progress
PIECE = 1 << 24  # bytes that are hashed and written at once
SYNC = 1 << 28  # bytes after which a file is synced, so that a slow disk shows progress


@dataclasses.dataclass(frozen=True)
class Save:
    """The files of a rank that become part of a checkpoint.

    Args:
        staged: the staging folder of the checkpoint.
        target: the path of the complete checkpoint. Rank 0 renames `staged` to `target`.
        files: each key is a path relative to `staged`. Each value is a dict with the size `bytes`, and either `sha256`
            (if the file is on disk) or `start` (its offset in the memory).
        facts: additional entries of the manifest.
    """

    staged: str
    target: str
    files: dict[str, dict[str, Any]]
    facts: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Job:
    """The work of one rank's writer.

    Args:
        run_directory: the folder in which rank 0 deletes old checkpoints.
        rotation: which checkpoints it keeps.
        also: the step of another checkpoint that it keeps, or -1.
        trainer: the process id of the trainer. After the trainer has ended, rank 0 waits at most PATIENCE seconds for
            each rank.
        rank: this rank.
        ranks: the number of ranks. Rank 0 waits until all ranks have written their files.
        save: the checkpoint to write before. None: only old checkpoints are deleted.
    """

    run_directory: str
    rotation: Rotation
    also: int
    trainer: int
    rank: int
    ranks: int
    save: Save | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the object to send to the process that writes."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> "Job":
        """Return the job for an object of `to_json` that was sent as JSON."""
        fields = dict(document)
        fields["rotation"] = Rotation(*document["rotation"])
        if document["save"] is not None:
            fields["save"] = Save(**document["save"])
        return cls(**fields)


@dataclasses.dataclass(frozen=True)
class Done:
    """The reply of the process that writes: a job has been performed.

    Args:
        seconds: the duration.
        bytes: the size of the checkpoint that is complete now, or 0.
    """

    seconds: float
    bytes: int = 0


class HashedFile:
    """A file object that hashes all data written to it, and calls `progress` per piece."""

    def __init__(self, file: BinaryIO, progress: Callable[[], None]) -> None:
        self.file = file
        self.progress = progress
        self.digest = hashlib.sha256()
        self.bytes = 0
        self.synced = 0

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        for start in range(0, len(view), PIECE):
            end = start + PIECE
            piece = view[start:end]
            self.digest.update(piece)
            self.bytes += self.file.write(piece)
            if self.bytes - self.synced >= SYNC:
                self.file.flush()
                os.fdatasync(self.file.fileno())
                self.synced = self.bytes
            self.progress()
        return len(view)

    def flush(self) -> None:
        self.file.flush()

    def finish(self) -> dict[str, Any]:
        """Sync the file to disk. Return its size (`bytes`) and its hash (`sha256`)."""
        self.file.flush()
        os.fsync(self.file.fileno())
        return {"bytes": self.bytes, "sha256": self.digest.hexdigest()}


def perform(job: Job, memory: memoryview, progress: Callable[[], None]) -> Done:
    """Write the files of one rank. Rank 0 then writes the manifest of all files.

    Args:
        progress: a function that is called again and again while this rank, or the rank it waits for, writes.
    """
    began = time.monotonic()
    size = 0
    if job.save is not None:
        files = _write_files(job.save, memory, progress)
        staged = Path(job.save.staged)
        if job.rank:
            report = json.dumps({"files": files})
            write_whole(_report(staged, job.rank), report)
            return Done(time.monotonic() - began)
        for rank in range(1, job.ranks):
            files |= _wait_for_report(staged, rank, progress, trainer=job.trainer)
        size = seal(staged, files, **job.save.facts)
        target = Path(job.save.target)
        publish(staged, target)
        delete_tree(staged.parent)
    run_directory = Path(job.run_directory)
    rotate(run_directory, job.rotation, also=job.also)
    return Done(time.monotonic() - began, size)


def serve(descriptor: int) -> None:
    """Perform the jobs of the trainer, which shares the memory behind `descriptor`."""

    def write(document: dict[str, Any], progress: Callable[[], None]) -> dict[str, Any]:
        with mmap.mmap(descriptor, 0) as shared, memoryview(shared) as memory:
            job = Job.from_json(document)
            done = perform(job, memory, progress)
            return dataclasses.asdict(done)

    # After an error, the trainer deletes the staging folder. If the trainer has ended, the next start does.
    side_process.serve(write)


def _write_files(save: Save, memory: memoryview, progress: Callable[[], None]) -> dict[str, dict[str, Any]]:
    """Write the files that are in the memory. Return the manifest entries of all files of this rank."""
    files: dict[str, dict[str, Any]] = {}
    for name, entry in save.files.items():
        path = Path(save.staged, name)
        files[name] = _write_file(path, entry, memory, progress)
    return files


def _write_file(path: Path, entry: dict[str, Any], memory: memoryview, progress: Callable[[], None]) -> dict[str, Any]:
    if "start" not in entry:
        return entry
    start = entry["start"]
    end = start + entry["bytes"]
    # A writer that outlived its trainer may not write into the files of the next start.
    with path.open("xb") as file:
        hashed = HashedFile(file, progress)
        hashed.write(memory[start:end])
        return hashed.finish()


def _report(staged: Path, rank: int) -> Path:
    # With the name of the checkpoint, because the reports of the previous save may not have been deleted.
    return staged.with_name(f"{staged.name}-written-{rank}.json")


def _wait_for_report(staged: Path, rank: int, progress: Callable[[], None], *, trainer: int) -> dict[str, Any]:
    """Wait until `rank` has written its files, and return their manifest entries."""
    orphaned_at: float | None = None
    grows = growth(staged)
    while True:
        report = read_object(_report(staged, rank))
        if report:
            return report["files"]
        if not staged.is_dir():
            raise FileNotFoundError(f"{staged} was deleted, because another rank could not write its files.")
        if grows():
            progress()
            orphaned_at = None
        if trainer not in (os.getpid(), os.getppid()):
            if orphaned_at is None:
                orphaned_at = time.monotonic()
            if time.monotonic() - orphaned_at > PATIENCE:
                raise TimeoutError(f"Rank {rank} has not written its files.")
        time.sleep(0.02)

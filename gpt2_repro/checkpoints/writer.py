"""Write the files of a checkpoint to disk, and its manifest last.

This runs in the training process, or in a separate process while training continues.
"""

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


class HashedFile:
    """A file object that hashes all data written to it, and calls `progress` per piece."""

    def __init__(self, file: BinaryIO, progress: Callable[[], None]) -> None:
        self.file, self.progress = file, progress
        self.digest, self.bytes, self.synced = hashlib.sha256(), 0, 0

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        for start in range(0, len(view), PIECE):
            piece = view[start : start + PIECE]
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


def perform(job: dict[str, Any], memory: memoryview, progress: Callable[[], None]) -> float:
    """Write the files of one rank. Rank 0 then writes the manifest of all files.

    Returns the duration in seconds.

    Args:
        job: a dict with the keys below. Without the key `staged`, nothing is written, and only old checkpoints are
            deleted.
            `staged`: the staging folder of the checkpoint.
            `files`: the files of this rank. Each key is a path relative to `staged`. Each value is a dict with the
            size `bytes`, and either `sha256` (if the file is on disk) or `start` (its offset in `memory`).
            `rank`, `ranks`: this rank, and the number of ranks. Rank 0 waits until all ranks have written their files.
            `trainer`: the process id of the trainer. After the trainer has ended, rank 0 waits at most
            PATIENCE seconds for each rank.
            `facts`: additional entries of the manifest.
            `target`: the path of the complete checkpoint. Rank 0 renames `staged` to `target`.
            `run`: the run directory in which rank 0 deletes old checkpoints.
            `rotation`: which checkpoints it keeps, as a list, and `also`: the step of another one.
        progress: a function that is called again and again while this rank, or the rank it waits for, writes.
    """
    began = time.monotonic()
    if "staged" in job:
        staged, target = Path(job["staged"]), Path(job["target"])
        files = {name: _write_file(staged / name, entry, memory, progress) for name, entry in job["files"].items()}
        if job["rank"]:
            write_whole(_report(staged, job["rank"]), json.dumps({"files": files}))
            return time.monotonic() - began
        for rank in range(1, job["ranks"]):
            files |= _wait_for_report(staged, rank, progress, trainer=job["trainer"])
        seal(staged, files, **job["facts"])
        publish(staged, target)
        delete_tree(staged.parent)
    rotate(Path(job["run"]), Rotation(*job["rotation"]), also=job["also"])
    return time.monotonic() - began


def serve(descriptor: int) -> None:
    """Perform the jobs of the trainer, which shares the memory behind `descriptor`."""

    def write(job: dict[str, Any], progress: Callable[[], None]) -> dict[str, Any]:
        with mmap.mmap(descriptor, 0) as shared, memoryview(shared) as memory:
            return {"seconds": perform(job, memory, progress)}

    # After an error, the trainer deletes the staging folder. If the trainer has ended, the next start does.
    side_process.serve(write)


def _write_file(path: Path, entry: dict[str, Any], memory: memoryview, progress: Callable[[], None]) -> dict[str, Any]:
    if "start" not in entry:
        return entry
    # A writer that outlived its trainer may not write into the files of the next start.
    with path.open("xb") as file:
        hashed = HashedFile(file, progress)
        hashed.write(memory[entry["start"] : entry["start"] + entry["bytes"]])
        return hashed.finish()


def _report(staged: Path, rank: int) -> Path:
    # With the name of the checkpoint, because the reports of the previous save may not have been deleted.
    return staged.with_name(f"{staged.name}-written-{rank}.json")


def _wait_for_report(staged: Path, rank: int, progress: Callable[[], None], *, trainer: int) -> dict[str, Any]:
    """Wait until `rank` has written its files, and return their manifest entries."""
    orphaned_at, grows = None, growth(staged)
    while not (report := read_object(_report(staged, rank))):
        if not staged.is_dir():
            raise FileNotFoundError(f"{staged} was deleted, because another rank could not write its files.")
        if grows():
            progress()
            orphaned_at = None
        if trainer not in (os.getpid(), os.getppid()):
            orphaned_at = orphaned_at or time.monotonic()
            if time.monotonic() - orphaned_at > PATIENCE:
                raise TimeoutError(f"Rank {rank} has not written its files.")
        time.sleep(0.02)
    return report["files"]

"""Who uses a prepared folder: one process makes it, many read it, and nobody replaces what is read."""

import contextlib
import fcntl
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from gpt2_repro.errors import UserError


logger = logging.getLogger(__name__)

_readers: list[IO[str]] = []  # kept open, and so locked, until the process ends


def hold_for_reading(folder: Path) -> None:
    """Until this process ends, keep others from replacing the folder.

    Mapped files that are replaced under a reader end it with SIGBUS. A file system that cannot lock is passed over.
    """
    try:
        file = (folder / "manifest.json").open()
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        _readers.append(file)
    except OSError as error:
        logger.warning("%s cannot be locked against being replaced (%s)", folder, error)


@contextlib.contextmanager
def hold_alone(folder: Path) -> Iterator[None]:
    """Keep a folder that may be replaced to this process. Raises UserError where something reads it."""
    path = folder / "manifest.json"
    if not path.is_file():
        if folder.exists():
            raise UserError(f"{folder} exists and is no prepared folder: name another --dataset_dir or move it away")
        yield
        return
    with path.open() as file:
        _lock(file, f"{folder} is open in a training: wait for it or end it, or name another --dataset_dir")
        yield


@contextlib.contextmanager
def hold_staging(staging: Path) -> Iterator[None]:
    """Keep a preparation to this process. Raises UserError where another one is at it."""
    staging.mkdir(parents=True, exist_ok=True)
    with (staging / ".lock").open("w") as file:
        target = staging.with_suffix("")
        _lock(file, f"another process is preparing {target}: wait for it or end it")
        yield


def _lock(file: IO[str], message: str) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise UserError(message) from None

"""Who uses a prepared folder: one process makes it, many read it, and nobody replaces what is read."""

import contextlib
import fcntl
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from gpt2_repro.data.manifest import MANIFEST, not_prepared
from gpt2_repro.errors import UserError
from gpt2_repro.files import read_object


logger = logging.getLogger(__name__)


def reading_lock(folder: Path) -> None:
    """Until this process ends, keep others from replacing the folder. Raises UserError where one is at it.

    Mapped files that are replaced under a reader end it with SIGBUS. A file system that cannot lock is passed over.
    """
    try:
        # Never closed, and so locked until the process ends.
        fcntl.flock(os.open(folder, os.O_RDONLY), fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"{folder} is being replaced: wait for it, or name another --dataset_dir") from None
    except OSError as error:
        logger.warning("%s cannot be locked against being replaced (%s)", folder, error)


@contextlib.contextmanager
def exclusive_lock(folder: Path) -> Iterator[None]:
    """Lock a prepared folder that may be replaced. Raises UserError if it is not ours, or something reads it."""
    if not folder.exists():
        yield
        return
    if "request" not in read_object(folder / MANIFEST):
        raise UserError(not_prepared(folder))
    with _locked(folder, f"{folder} is open in a training: wait for it or end it, or name another --dataset_dir"):
        yield


@contextlib.contextmanager
def staging_lock(staging: Path) -> Iterator[None]:
    """Keep a preparation to this process. Raises UserError where another one is at it, and where nothing can be made."""
    try:
        staging.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{staging} cannot be made ({error.strerror}): name another --dataset_dir") from None
    with _locked(staging, f"another process is preparing {staging.with_suffix('')}: wait for it or end it"):
        yield


@contextlib.contextmanager
def _locked(folder: Path, message: str) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise UserError(message) from None
    finally:
        os.close(descriptor)

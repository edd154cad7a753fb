"""Files of a checkpoint are hashed from the memory they are written from, not from what a disk gives back."""

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch


UNREAD = "training_args.bin"  # settings as a pickle: nothing reads it, and recipe.yaml has them


@contextlib.contextmanager
def hashed_saves(folder: Path) -> Iterator[dict[str, dict[str, Any]]]:
    """While open, files that `torch.save` writes below `folder` are hashed on the way and wait until they are on the disk.

    transformers and deepspeed both save through it. Yields `bytes` and `sha256` of each, by its path in the folder: of
    this process's files, each from the memory they were written from.
    """
    written: dict[str, dict[str, Any]] = {}
    original = torch.save

    def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        path = Path(f) if isinstance(f, str | os.PathLike) else None
        if path is None or not path.is_relative_to(folder):
            return original(obj, f, *args, **kwargs)
        if path.name == UNREAD:
            return None
        with path.open("wb") as file:
            hashed = _HashedFile(file)
            original(obj, hashed, *args, **kwargs)
            file.flush()
            os.fsync(file.fileno())
        written[str(path.relative_to(folder))] = {"bytes": hashed.bytes, "sha256": hashed.digest.hexdigest()}
        return None

    torch.save = save
    try:
        yield written
    finally:
        torch.save = original


class _HashedFile:
    """What torch.save needs of a file; it writes from the first byte to the last."""

    def __init__(self, file: Any) -> None:
        self.file, self.digest, self.bytes = file, hashlib.sha256(), 0

    def write(self, data: Any) -> int:
        self.digest.update(data)
        self.bytes += len(data)
        return self.file.write(data)

    def flush(self) -> None:
        self.file.flush()

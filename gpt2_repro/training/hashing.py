"""Hash the files of a checkpoint in memory while they are written."""

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from transformers import modeling_utils


NOT_SAVED = "training_args.bin"  # a pickle of the settings. Nothing reads it, and recipe.yaml contains them.


@contextlib.contextmanager
def hashed_saves(folder: Path) -> Iterator[dict[str, dict[str, Any]]]:
    """Hash each file that this process saves below `folder` in the `with` block.

    Only files that `torch.save` writes, and safetensors files that transformers writes, are hashed and synced to disk.

    Yields a dict, to which each hashed file adds an entry. The key is the path relative to `folder`. The value is a
    dict with the size (`bytes`) and the hash (`sha256`).
    """
    written: dict[str, dict[str, Any]] = {}
    save_pickle, save_weights = torch.save, modeling_utils.safe_save_file

    @contextlib.contextmanager
    def hashed_file(path: Path) -> Iterator[_HashedFile]:
        with path.open("wb") as file:
            hashed = _HashedFile(file)
            yield hashed
            file.flush()
            os.fsync(file.fileno())
        written[str(path.relative_to(folder))] = {"bytes": hashed.bytes, "sha256": hashed.digest.hexdigest()}

    def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        path = Path(f) if isinstance(f, str | os.PathLike) else None
        if path is None or not path.is_relative_to(folder):
            save_pickle(obj, f, *args, **kwargs)
        elif path.name != NOT_SAVED:
            with hashed_file(path) as file:
                save_pickle(obj, file, *args, **kwargs)

    def save_file(tensors: dict[str, torch.Tensor], filename: Any, metadata: dict[str, str] | None = None) -> None:
        if not Path(filename).is_relative_to(folder):
            return save_weights(tensors, filename, metadata)
        with hashed_file(Path(filename)) as file:
            file.write(safetensors.torch.save(tensors, metadata))  # a second copy of the weights in memory
        return None

    torch.save, modeling_utils.safe_save_file = save, save_file
    try:
        yield written
    finally:
        torch.save, modeling_utils.safe_save_file = save_pickle, save_weights


class _HashedFile:
    """A file object for torch.save that hashes all data written to it."""

    def __init__(self, file: Any) -> None:
        self.file, self.digest, self.bytes = file, hashlib.sha256(), 0

    def write(self, data: Any) -> int:
        self.digest.update(data)
        self.bytes += len(data)
        return self.file.write(data)

    def flush(self) -> None:
        self.file.flush()

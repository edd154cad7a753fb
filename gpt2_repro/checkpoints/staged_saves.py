"""Hash the files of a checkpoint while they are saved, or copy them to memory."""

import contextlib
import json
import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import modeling_utils

from gpt2_repro.checkpoints.writer import HashedFile
from gpt2_repro.errors import RunFailed
from gpt2_repro.text import size as size_text


NOT_SAVED = "training_args.bin"  # a pickle of the settings. Nothing reads it, and recipe.yaml contains them.
DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}  # names in safetensors files


class StagingMemory:
    """Memory for the files of a checkpoint, shared with the process that writes them.

    The memory is allocated before the first save, because a copy into newly allocated memory takes ten times as long.
    """

    def __init__(self, size: int) -> None:
        # Not limited by the size of /dev/shm, which is often 64 MB in containers.
        self.descriptor = os.memfd_create("checkpoint")
        self.size = self.used = 0
        self._grow(size + size // 50 + (1 << 20))  # and the headers of the files

    def write(self, data: Any) -> int:
        """Append `data`. This is the method that torch.save needs."""
        piece = memoryview(data).cast("B")
        end = self.used + len(piece)
        if end > self.size:
            self._grow(end + end // 8)
        self.view[self.used : end] = piece
        self.used = end
        return len(piece)

    def flush(self) -> None:
        """Do nothing. torch.save calls this method."""

    def _grow(self, size: int) -> None:
        try:
            os.posix_fallocate(self.descriptor, 0, size)
        except OSError as error:
            problem = f"Copying a checkpoint needs {size_text(size)} of memory ({error.strerror})"
            raise RunFailed(f"{problem}. Pass --no_background_save, or use a machine with more memory.") from None
        self.size = size
        self.view = memoryview(mmap.mmap(self.descriptor, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE))


def write_safetensors(tensors: dict[str, torch.Tensor], file: Any, metadata: dict[str, str] | None) -> None:
    """Write tensors to `file` in the safetensors format.

    The bytes are the same as from safetensors' `save_file`. Contiguous tensors on the CPU are written without an
    intermediate copy.
    """
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for name, tensor in ordered:
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for _, tensor in ordered:
        file.write(memoryview(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()))


@contextlib.contextmanager
def hashed_saves(
    folder: Path, memory: StagingMemory | None, progress: Callable[[], None]
) -> Iterator[dict[str, dict[str, Any]]]:
    """Write and hash the files that the block saves, or copy them to `memory`.

    These are files below `folder` from `torch.save`, and safetensors files from transformers. `progress` is called
    after each piece that is written to disk.

    Yields a dict with each file's size (`bytes`) and hash (`sha256`) or position in the memory (`start`), by the path
    relative to `folder`.
    """
    # transformers and DeepSpeed have no hook for the files of a checkpoint, and hash nothing.
    written: dict[str, dict[str, Any]] = {}
    save_pickle, save_weights = torch.save, modeling_utils.safe_save_file
    checksums = torch.serialization.get_crc32_options()

    def write(path: Path, save_to: Callable[[Any], None]) -> None:
        name = str(path.relative_to(folder))
        if memory is not None:
            start = memory.used
            save_to(memory)
            written[name] = {"bytes": memory.used - start, "start": start}
        else:
            with path.open("xb") as file:
                hashed = HashedFile(file, progress)
                save_to(hashed)
                written[name] = hashed.finish()

    def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        path = Path(f) if isinstance(f, str | os.PathLike) else None
        if path is None or not path.is_relative_to(folder):
            save_pickle(obj, f, *args, **kwargs)
        elif path.name != NOT_SAVED:
            write(path, lambda file: save_pickle(obj, file, *args, **kwargs))

    def save_file(tensors: dict[str, torch.Tensor], filename: Any, metadata: dict[str, str] | None = None) -> None:
        if Path(filename).is_relative_to(folder):
            write(Path(filename), lambda file: write_safetensors(tensors, file, metadata))
        else:
            save_weights(tensors, filename, metadata)

    if memory is not None:
        memory.used = 0
    # The manifest has a SHA-256 of each file. The checksums in files of torch.save would triple the time of a copy.
    torch.serialization.set_crc32_options(False)
    torch.save, modeling_utils.safe_save_file = save, save_file
    try:
        yield written
    finally:
        torch.save, modeling_utils.safe_save_file = save_pickle, save_weights
        torch.serialization.set_crc32_options(checksums)

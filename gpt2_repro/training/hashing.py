"""Copy a checkpoint to memory, and write safetensors files without a copy."""

import json
import mmap
import os
from typing import Any

import torch


SAFETENSORS_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}  # names in safetensors files


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
        os.posix_fallocate(self.descriptor, 0, size)  # raises OSError if there is too little memory
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
        header[name] = {
            "dtype": SAFETENSORS_DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for _, tensor in ordered:
        file.write(memoryview(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()))

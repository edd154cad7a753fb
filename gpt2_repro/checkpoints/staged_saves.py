"""Copy the large files of a checkpoint to memory, or hash them while they are written to disk."""

import json
import logging
import mmap
import os
import pickle
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils.serialization import config as serialization_config

from gpt2_repro.checkpoints.writer import HashedFile
from gpt2_repro.errors import RunFailed
from gpt2_repro.text import size as size_text


logger = logging.getLogger(__name__)

DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}  # names in safetensors files


class StagingMemory:
    """Memory for the files of a checkpoint, shared with the process that writes them.

    The memory is allocated before the first save, because a copy into newly allocated memory takes ten times as long.
    If CUDA is in use, the memory is pinned, so that a GPU copies to it at the speed of the bus.
    """

    def __init__(self, size: int) -> None:
        # Not limited by the size of /dev/shm, which is often 64 MB in containers.
        self.descriptor = os.memfd_create("checkpoint")
        self.size = 0
        self.used = 0
        self.skipped: list[tuple[int, int]] = []  # start and size of the parts that torch.save has left out
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []  # targets and sources
        self._pinned_at = 0
        self._device: int | None = None
        if torch.cuda.is_initialized():
            self._device = torch.cuda.current_device()
        headers = size // 50 + (1 << 20)  # of the files
        self._allocate(size + headers)
        self._thread = ThreadPoolExecutor(1)
        self._work = self._thread.submit(self._prepare)  # 2 GB take a second

    def clear(self) -> None:
        """Begin again at the start. The first call waits until the memory can be used."""
        self.wait()
        self.used = 0
        self._copies = []

    def reserve(self, size: int) -> int:
        """Append `size` bytes, and return their start."""
        start = self.used
        end = start + size
        if end > self.size:
            self._allocate(end + end // 8)
            self._thread.submit(self._prepare).result()
        self.used = end
        return start

    def write(self, data: Any) -> int:
        """Append `data`. This is the method that torch.save needs."""
        piece = memoryview(data).cast("B")
        size = len(piece)
        start = self.reserve(size)
        end = start + size
        self.view[start:end] = piece
        return size

    def seek(self, size: int, whence: int) -> int:
        """Leave out `size` bytes. torch.save calls this method for each storage, within `skip_data`."""
        start = self.reserve(size)
        self.skipped.append((start, size))
        return self.used

    def flush(self) -> None:
        """Do nothing. torch.save calls this method."""

    def copy(self, data: torch.Tensor, start: int) -> None:
        """Let `begin` copy a tensor of bytes to `start`."""
        size = data.numel()
        if size:
            target = torch.frombuffer(self.view, dtype=torch.uint8, count=size, offset=start)
            self._copies.append((target, data))

    def begin(self, then: Callable[[], None]) -> None:
        """Copy the tensors in the background, and then call `then`. Until `wait` returns, they may not change."""
        copies = self._copies
        self._copies = []
        stream: torch.cuda.Stream | None = None
        if self._device is not None:
            stream = _copy_in_stream(copies)

        def finish() -> None:
            if stream is None:
                for target, source in copies:
                    target.copy_(source)
            else:
                stream.synchronize()
            copies.clear()  # not earlier: the memory of these tensors would be used again
            then()

        self._work = self._thread.submit(finish)

    def wait(self) -> None:
        """Wait until all tensors are copied and `then` has returned. Raises its error."""
        self._work.result()

    def _allocate(self, size: int) -> None:
        try:
            os.posix_fallocate(self.descriptor, 0, size)
        except OSError as error:
            problem = f"Copying a checkpoint needs {size_text(size)} of memory ({error.strerror})"
            raise RunFailed(f"{problem}. Pass --no_background_save, or use a machine with more memory.") from None
        if self._pinned_at:
            unregister = torch.cuda.cudart().cudaHostUnregister
            self._thread.submit(unregister, self._pinned_at).result()
            self._pinned_at = 0
        self.size = size
        pages = mmap.mmap(self.descriptor, size)
        self.view = memoryview(pages)

    def _prepare(self) -> None:
        """Map and pin the memory. Call this in `_thread`.

        CUDA keeps the last error of each thread, and torch (2.13) does not clear the error of cudaHostRegister and
        cudaHostUnregister. In the main thread, it would be raised by the next kernel. `_thread` launches none.
        """
        pages = torch.frombuffer(self.view, dtype=torch.uint8)
        pages[self.used :].zero_()  # maps each page; unlike with MAP_POPULATE, other threads continue meanwhile
        if self._device is not None:
            torch.cuda.set_device(self._device)  # in this thread
            address = pages.data_ptr()
            register = torch.cuda.cudart().cudaHostRegister
            code = int(register(address, self.size, 1))
            if code == 0:
                self._pinned_at = address
            else:
                text = "Saves pause the training for longer: memory cannot be pinned (CUDA error %d)."
                logger.warning(text, code)


def _copy_in_stream(copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.cuda.Stream:
    """Begin to copy from a GPU to pinned memory. Return the stream, which waits for the work so far."""
    stream = torch.cuda.Stream()
    current = torch.cuda.current_stream()
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        for target, source in copies:
            target.copy_(source, non_blocking=True)
    return stream


class StagedFiles:
    """The large files of one save, which are copied to `memory` or written to disk.

    Args:
        folder: the staging folder of the checkpoint.
        memory: where to copy the files. None: write them to `folder`.
        progress: a function that is called after each piece that is written to disk.

    Attributes:
        files: each file's size (`bytes`) and hash (`sha256`) or position in the memory (`start`), by the path relative
            to `folder`. The manifest needs also the small files, which `manifest.seal` hashes.
    """

    def __init__(self, folder: Path, memory: StagingMemory | None, progress: Callable[[], None]) -> None:
        self.folder = folder
        self.memory = memory
        self.progress = progress
        self.files: dict[str, dict[str, Any]] = {}
        if memory is not None:
            memory.clear()

    def save(self, obj: Any, path: str | os.PathLike[str]) -> None:
        """Save an object as torch.save does."""
        # The manifest has a SHA-256 of each file. These checksums would triple the time. Without them, `unzip` reports
        # errors; torch.load does not check them.
        with serialization_config.patch("save.compute_crc32", False):
            self._write(Path(path), lambda file: _save(obj, file))

    def save_safetensors(
        self, tensors: dict[str, torch.Tensor], path: Any, metadata: dict[str, str] | None = None
    ) -> None:
        """Save tensors with the same bytes as safetensors' `save_file`."""

        def rank(name: str) -> tuple[int, str]:
            return -tensors[name].element_size(), name

        # Larger elements first, so that each tensor is aligned.
        ordered = {name: tensors[name] for name in sorted(tensors, key=rank)}
        header = _safetensors_header(ordered, metadata)

        def write(file: Any) -> None:
            file.write(header)
            for tensor in ordered.values():
                flat = tensor.detach().contiguous().reshape(-1)
                data = flat.view(torch.uint8)
                if isinstance(file, StagingMemory):
                    start = file.reserve(data.numel())
                    file.copy(data, start)
                else:
                    array = data.cpu().numpy()
                    file.write(memoryview(array))

        self._write(Path(path), write)

    def _write(self, path: Path, write: Callable[[Any], None]) -> None:
        name = str(path.relative_to(self.folder))
        if self.memory is not None:
            start = self.memory.used
            write(self.memory)
            size = self.memory.used - start
            self.files[name] = {"bytes": size, "start": start}
            return
        with path.open("xb") as file:
            hashed = HashedFile(file, self.progress)
            write(hashed)
            self.files[name] = hashed.finish()


def _safetensors_header(tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None) -> bytes:
    """Return the start of a safetensors file: the size of the header, and the header with padding."""
    entries: dict[str, Any] = {}
    if metadata:
        entries["__metadata__"] = metadata
    start = 0
    for name, tensor in tensors.items():
        end = start + tensor.nbytes
        entries[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False)
    header = text.encode()
    padding = -len(header) % 8
    header += b" " * padding
    size = len(header).to_bytes(8, "little")
    return size + header


def _save(obj: Any, file: Any) -> None:
    """Save an object with torch.save. To memory, the storages of its tensors are copied in the background."""
    if not isinstance(file, StagingMemory):
        torch.save(obj, file)
        return
    storages: dict[int, torch.UntypedStorage] = {}

    class Pickler(pickle.Pickler):
        """A pickler that lists the storages in the order in which torch.save writes them."""

        def reducer_override(self, part: Any) -> Any:
            if isinstance(part, torch.Tensor):
                storage = part.untyped_storage()
                if storage.nbytes():
                    storages.setdefault(storage._cdata, storage)
            return NotImplemented

    file.skipped = []
    with torch.serialization.skip_data():
        module = SimpleNamespace(__name__="pickle", Pickler=Pickler)
        torch.save(obj, file, pickle_module=module)
    for storage, (start, size) in zip(storages.values(), file.skipped, strict=True):
        if size != storage.nbytes():
            raise RuntimeError("torch.save has written the storages in another order.")
        data = torch.empty(0, dtype=torch.uint8, device=storage.device)
        data.set_(storage)
        file.copy(data, start)

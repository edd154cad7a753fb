"""Whether there is room for what will come into a folder, and how fast the disk is on which it lies."""

import contextlib
import functools
import os
import shutil
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from gpt2_repro.preflight.findings import Finding
from gpt2_repro.units import size


PROBE_BYTES = 256 * 2**20
SLOW = 100e6  # bytes a second: a checkpoint of 2 GB then takes 20 s


class Need(NamedTuple):
    """Bytes that will come into a folder."""

    what: str
    folder: Path
    bytes: float


def check_room(needs: Sequence[Need], *, volume_bytes: int | None = None) -> list[Finding]:
    """Room for what will come, a line for each file system.

    Args:
        needs: the data first.
        volume_bytes: the size of the volume as it was rented, on which the first folder lies: what a network volume says of itself
            is the whole cluster's.
    """
    places: dict[int, list[Need]] = {}
    for need in needs:
        places.setdefault(_existing(need.folder).stat().st_dev, []).append(need)
    return [
        _check_place(of_place, volume_bytes=None if number else volume_bytes)
        for number, of_place in enumerate(places.values())
    ]


def _check_place(needs: Sequence[Need], *, volume_bytes: int | None) -> Finding:
    there = _existing(needs[0].folder)
    if volume_bytes is None:
        free, how = shutil.disk_usage(there).free, "free"
    else:
        free, how = volume_bytes - _used_bytes(_mount(there)), f"left of the volume's {size(volume_bytes)}"
    to_come = " and ".join(f"{size(need.bytes)} of {need.what} in {need.folder}" for need in needs)
    said = f"{size(max(0, free))} {how}, {to_come} to come"
    if free >= sum(need.bytes for need in needs):
        return Finding("✓", "disk", said)
    return Finding("✗", "disk", f"{said}: rent a larger one, or name another folder")


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there, without links."""
    resolved = folder.resolve()
    return next(path for path in (resolved, *resolved.parents) if path.is_dir())


def _mount(path: Path) -> Path:
    return next(parent for parent in (path, *path.parents) if parent.is_mount())


@functools.cache
def _used_bytes(mount: Path) -> int:
    """Bytes on the disk of all files of a file system that this process may see, without what is mounted inside it."""
    device, seen = mount.stat().st_dev, {}
    for folder, folders, files in os.walk(mount):
        folders[:] = [name for name in folders if _of(device, Path(folder, name))]
        for name in files:
            with contextlib.suppress(OSError):
                file = Path(folder, name).lstat()
                seen[file.st_ino] = 512 * file.st_blocks  # once for all its names, and nothing for its holes
    return sum(seen.values())


def _of(device: int, folder: Path) -> bool:
    try:
        return folder.lstat().st_dev == device
    except OSError:
        return False


def check_speeds(folders: Iterable[Path]) -> list[Finding]:
    """Of each place once, where folders that are not there yet will lie in one."""
    return [check_speed(folder) for folder in {_existing(folder): folder for folder in folders}.values()]


def check_speed(folder: Path) -> Finding:
    """Write and read 256 MB in a folder, past the cache where the system lets one."""
    there = _existing(folder)
    if any(path.exists() and not path.is_dir() for path in (folder.resolve(), *folder.resolve().parents)):
        return Finding("✗", "speed", f"{folder} lies in a file or is one: name another folder")
    probe = there / f".preflight-{os.getpid()}"
    try:
        written, read = _write_and_read(probe)
    except OSError as error:
        return Finding("✗", "speed", f"{there} cannot be written ({error.strerror}): name another folder")
    finally:
        with contextlib.suppress(OSError):
            probe.unlink(missing_ok=True)
    slow = min(written, read) < SLOW
    advice = ": keep the data on a local disk, and save less often" if slow else ""
    return Finding(
        "!" if slow else "✓",
        "speed",
        f"writes {written / 1e6:,.0f} and reads {read / 1e6:,.0f} MB/s in {there}{advice}",
    )


def _write_and_read(probe: Path) -> tuple[float, float]:
    """Bytes a second of both."""
    block = os.urandom(2**22)
    began = time.perf_counter()
    with probe.open("wb") as file:
        for _ in range(PROBE_BYTES // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        written = PROBE_BYTES / (time.perf_counter() - began)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    began = time.perf_counter()
    with probe.open("rb", buffering=0) as file:
        while file.read(len(block)):
            pass
    return written, PROBE_BYTES / (time.perf_counter() - began)

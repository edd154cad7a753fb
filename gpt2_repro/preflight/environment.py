"""Whether a machine can do what a run will ask of it: versions, driver, memory for sharing, files, disks, secrets."""

import contextlib
import functools
import os
import platform
import re
import resource
import shutil
import sys
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from gpt2_repro.preflight.findings import Finding


# The least major version of the NVIDIA driver that runs a CUDA of this major version (NVIDIA, CUDA compatibility).
DRIVERS = {11: 450, 12: 525, 13: 580}
LEAST_SHARED_MEMORY = 1e9  # NCCL and the readers of rows share through it; Docker's default is 64 MB
LEAST_OPEN_FILES = 4096
PROBE_BYTES = 256 * 2**20
SLOW = 100e6  # bytes a second: a checkpoint of 2 GB then takes 20 s
SECRETS = ("HF_TOKEN", "WANDB_API_KEY", "RUNPOD_API_KEY")
PACKAGES = ("torch", "transformers", "accelerate", "deepspeed", "datasets", "lm_eval")


def check_python(requirements: Path) -> list[Finding]:
    """Python, and the packages that requirements.txt pins."""
    found = []
    supported = sys.version_info >= (3, 11)
    found.append(
        Finding(
            "✓" if supported else "✗", "python", platform.python_version() + ("" if supported else ": 3.11 or newer")
        )
    )
    pins = dict(re.findall(r"^([\w-]+)==([\w.]+)", requirements.read_text(), flags=re.MULTILINE))
    for package in PACKAGES:
        try:
            installed = version(package)
        except PackageNotFoundError:
            found.append(Finding("✗", package, "is not installed: pip install -r requirements.txt"))
            continue
        pinned = pins.get(package, installed)
        same = installed == pinned
        found.append(
            Finding("✓" if same else "!", package, installed if same else f"{installed}, tested with {pinned}")
        )
    return found


def check_driver(driver: str | None, cuda: str | None) -> Finding:
    """The driver against the CUDA that torch was built for. `driver` None: no NVIDIA device; `cuda` None: a CPU wheel."""
    if driver is None:
        return Finding("!", "driver", "no NVIDIA device is here: everything runs on the CPU")
    if cuda is None:
        return Finding("✗", "driver", f"driver {driver}, and torch is built without CUDA: install a torch with CUDA")
    needed = DRIVERS.get(int(cuda.split(".")[0]))
    major = int(driver.split(".")[0]) if driver[:1].isdigit() else None
    if needed is None or major is None:
        return Finding("!", "driver", f"driver {driver} and CUDA {cuda}: not known to this table")
    if major < needed:
        return Finding(
            "✗",
            "driver",
            f"driver {driver} cannot run CUDA {cuda}, which needs {needed} or newer: rent a machine with a newer driver, or install a "
            "torch built for an older CUDA",
        )
    return Finding("✓", "driver", f"{driver} runs CUDA {cuda}")


def check_limits(shared_memory: Path = Path("/dev/shm")) -> list[Finding]:
    """Shared memory and open files."""
    found = []
    if shared_memory.is_dir():
        size = shutil.disk_usage(shared_memory).total
        enough = size >= LEAST_SHARED_MEMORY
        mend = "" if enough else ": NCCL and readers of rows need 1 GB; start the container with --shm-size 16g"
        found.append(Finding("✓" if enough else "✗", "shared memory", f"{size / 1e9:.1f} GB{mend}"))
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    few = 0 <= files < LEAST_OPEN_FILES
    found.append(Finding("!" if few else "✓", "open files", f"{files}{': type ulimit -n 65536' if few else ''}"))
    return found


def check_room(name: str, folder: Path, needed: int, *, volume_bytes: int | None = None) -> Finding:
    """Room in a folder for so many bytes more.

    Args:
        volume_bytes: the size of the volume as it was rented: what a network volume says of itself is the whole cluster's.
    """
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if volume_bytes is None:
        free, how = shutil.disk_usage(there).free, "free"
    else:
        free, how = volume_bytes - _used_bytes(_mount(there)), f"left of the volume's {volume_bytes / 1e9:.0f}"
    said = f"{max(0, free) / 1e9:.0f} GB {how} at {folder}, {needed / 1e9:.1f} GB to come"
    return (
        Finding("✓", name, said)
        if free >= needed
        else Finding("✗", name, f"{said}: rent a larger one, or name another folder")
    )


def _mount(path: Path) -> Path:
    return next(parent for parent in (path, *path.parents) if parent.is_mount())


@functools.cache
def _used_bytes(mount: Path) -> int:
    """Bytes of all files of a file system that this process may see, without what is mounted inside it."""
    device, total = mount.stat().st_dev, 0
    for folder, folders, files in os.walk(mount):
        folders[:] = [name for name in folders if _of(device, Path(folder, name))]
        for name in files:
            with contextlib.suppress(OSError):
                total += Path(folder, name).lstat().st_size
    return total


def _of(device: int, folder: Path) -> bool:
    try:
        return folder.lstat().st_dev == device
    except OSError:
        return False


def check_speed(name: str, folder: Path) -> Finding:
    """Write and read 256 MB in a folder, past the cache where the system lets one."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    probe = there / f".preflight-{os.getpid()}"
    block = os.urandom(2**22)
    try:
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
        read = PROBE_BYTES / (time.perf_counter() - began)
    except OSError as error:
        return Finding("✗", name, f"{there} cannot be written ({error.strerror}): name another folder")
    finally:
        probe.unlink(missing_ok=True)
    slow = min(written, read) < SLOW
    advice = ": keep the data on a local disk, and save less often" if slow else ""
    return Finding(
        "!" if slow else "✓", name, f"writes {written / 1e6:,.0f} and reads {read / 1e6:,.0f} MB/s at {there}{advice}"
    )


def check_secrets(environment: Mapping[str, str]) -> Finding:
    """Which secrets are there; never what they are."""
    there = [name for name in SECRETS if environment.get(name)]
    missing = [name for name in SECRETS if name not in there]
    words = f"{', '.join(there) or 'none'} set" + (f", {', '.join(missing)} not" if missing else "")
    return Finding("✓", "secrets", words)

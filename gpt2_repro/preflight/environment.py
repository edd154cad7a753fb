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
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from gpt2_repro.preflight.findings import Finding
from gpt2_repro.units import size


# The least major version of the NVIDIA driver that runs a CUDA of this major version (NVIDIA, CUDA compatibility).
DRIVERS = {11: 450, 12: 525, 13: 580}
LEAST_SHARED_MEMORY = 1e9  # NCCL and the readers of rows share through it; Docker's default is 64 MB
LEAST_OPEN_FILES = 4096
PROBE_BYTES = 256 * 2**20
SLOW = 100e6  # bytes a second: a checkpoint of 2 GB then takes 20 s
SECRETS = ("HF_TOKEN", "WANDB_API_KEY", "RUNPOD_API_KEY")
PACKAGES = ("torch", "transformers", "accelerate", "deepspeed", "datasets", "lm_eval")
REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)\s*(?P<versions>[^;#\s]*)\s*(;(?P<marker>[^#]+))?")


def check_python(requirements: Path) -> list[Finding]:
    """Python, and the packages that requirements.txt asks for on this machine; imports none of them."""
    supported = sys.version_info >= (3, 11)
    words = platform.python_version() + ("" if supported else ": 3.11 or newer")
    found = [Finding("✓" if supported else "✗", "python", words)]
    lines = requirements.read_text().splitlines() if requirements.is_file() else []
    for line in lines:
        asked = REQUIREMENT.match(line)
        if asked is None or (asked["marker"] and not _applies(asked["marker"])):
            continue
        finding = _check_package(asked["name"], asked["versions"])
        # The others are told where something is wrong with them.
        if finding.mark != "✓" or asked["name"] in PACKAGES:
            found.append(finding)
    return found


def _applies(marker: str) -> bool:
    from packaging.markers import Marker

    return Marker(marker).evaluate()


def _check_package(name: str, versions: str) -> Finding:
    from packaging.specifiers import SpecifierSet

    try:
        installed = version(name)
    except PackageNotFoundError:
        return Finding("✗", name, "is not installed: pip install -r requirements.txt")
    if SpecifierSet(versions).contains(installed, prereleases=True):
        return Finding("✓", name, installed)
    least = [part for part in versions.split(",") if part.startswith(">=")]
    if least and not SpecifierSet(least[0]).contains(installed, prereleases=True):
        return Finding("✗", name, f"{installed}, and {versions} is needed: pip install -r requirements.txt")
    return Finding("!", name, f"{installed}, tested with {versions.removeprefix('==')}")


def check_driver(driver: str | None, cuda: str | None, *, usable: bool = False) -> Finding:
    """The driver against the CUDA that torch was built for.

    Args:
        driver: its version; None: no NVIDIA device.
        cuda: None: a CPU wheel.
        usable: whether torch computes on a device all the same, as NVIDIA's compatibility packages let it.
    """
    if driver is None:
        return Finding("!", "driver", "no NVIDIA device is here")
    if cuda is None:
        return Finding("✗", "driver", f"driver {driver}, and torch is built without CUDA: install a torch with CUDA")
    needed = DRIVERS.get(int(cuda.split(".")[0]))
    major = int(driver.split(".")[0]) if driver[:1].isdigit() else None
    if needed is None or major is None:
        return Finding("!", "driver", f"driver {driver} and CUDA {cuda}: not known to this table")
    if major >= needed:
        return Finding("✓", "driver", f"{driver} runs CUDA {cuda}")
    if usable:
        return Finding(
            "!", "driver", f"driver {driver} is older than CUDA {cuda} wants ({needed}), and torch can use it"
        )
    return Finding(
        "✗",
        "driver",
        f"driver {driver} cannot run CUDA {cuda}, which needs {needed} or newer: rent a machine with a newer driver, or install a torch "
        "built for an older CUDA",
    )


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


def check_secrets(environment: Mapping[str, str]) -> Finding:
    """Which secrets are there; never what they are."""
    there = [name for name in SECRETS if environment.get(name)]
    missing = [name for name in SECRETS if name not in there]
    words = f"{', '.join(there) or 'none'} set" + (f", {', '.join(missing)} not" if missing else "")
    return Finding("✓", "secrets", words)

"""The limits of memory and CPU time that containers, Slurm and systemd set for this process.

A limit applies to the control group (cgroup) of a process and to everything below it, so all parents are read too.
See man 7 cgroups, and the kernel's pages on cgroup-v1 and cgroup-v2.
"""

import math
import re
from dataclasses import dataclass
from pathlib import Path


PROC = Path("/proc/self")


@dataclass(frozen=True)
class Mount:
    """A mounted hierarchy of cgroups.

    Args:
        version: 1 or 2.
        options: the options of its mount. In version 1, the controllers are among them.
        root: the cgroup that is visible at `folder`. In a container, this is often the container's own.
    """

    version: int
    options: frozenset[str]
    root: Path
    folder: Path


def memory_limits() -> list[tuple[int, int]]:
    """Return the limit of each cgroup of this process that has one, and the free bytes below it."""
    limits = []
    for folder in _folders("memory"):
        # Above memory.high, the kernel does not end a process, but makes it so slow that it looks like a hang.
        numbers: list[int] = []
        for name in ("memory.max", "memory.high", "memory.limit_in_bytes"):
            numbers += [int(word) for word in _words(folder / name) if word.isdigit()]
        if numbers:
            limit = min(numbers)
            free = limit - _used_memory(folder)
            limits.append((limit, free))
    return limits


def _used_memory(folder: Path) -> int:
    """Return the bytes of memory that a cgroup uses, without the page cache that the kernel frees first."""
    used = _words(folder / "memory.current") or _words(folder / "memory.usage_in_bytes")
    if not used:
        return 0
    words = _words(folder / "memory.stat")
    statistics = dict(zip(words[::2], words[1::2], strict=True))
    inactive = statistics.get("total_inactive_file") or statistics.get("inactive_file", "0")
    return int(used[0]) - int(inactive)


def cpu_limits() -> list[int]:
    """Return the number of CPU cores, rounded up, of each quota that applies to this process."""
    limits = []
    for folder in _folders("cpu"):
        words = _words(folder / "cpu.max")
        if not words:
            words = _words(folder / "cpu.cfs_quota_us") + _words(folder / "cpu.cfs_period_us")
        # Without a quota, the first word is "max" or "-1".
        if len(words) == 2 and words[0].isdigit():
            quota, period = words
            cores = math.ceil(int(quota) / int(period))
            limits.append(max(1, cores))
    return limits


def _folders(controller: str) -> list[Path]:
    """Return the folders of this process's cgroups for a controller, and of their visible parents."""
    folders: list[Path] = []
    mounts = _mounts()
    for line in _lines(PROC / "cgroup"):
        _, names, path = line.split(":", 2)
        if not names:
            # In a hybrid layout, the files are missing here if version 1 has the controller.
            hierarchy = [mount for mount in mounts if mount.version == 2]
        elif controller in names.split(","):
            hierarchy = [mount for mount in mounts if mount.version == 1 and controller in mount.options]
        else:
            continue
        folders.extend(_folders_of(Path(path), hierarchy))
    return folders


def _folders_of(path: Path, hierarchy: list[Mount]) -> list[Path]:
    """Return the folders of the cgroup `path` and of its parents, as far as the mounts of its hierarchy show them."""
    folders: list[Path] = []
    for mount in hierarchy:
        if _is_below(path, mount.root):
            own = mount.folder / path.relative_to(mount.root)
            for folder in (own, *own.parents):
                if folder.is_relative_to(mount.folder):
                    folders.append(folder)
    if not folders:
        # The path and the mount belong to different cgroup namespaces. What a container sees is its own cgroup.
        return [mount.folder for mount in hierarchy]
    return folders


def _is_below(path: Path, root: Path) -> bool:
    # Paths outside of the cgroup namespace of this process begin with "/..".
    if not path.is_relative_to(root):
        return False
    relative = path.relative_to(root)
    return ".." not in relative.parts


def _mounts() -> list[Mount]:
    """Return the mounted hierarchies of cgroups. See man 5 proc_pid_mountinfo."""
    mounts = []
    for line in _lines(PROC / "mountinfo"):
        mounted, _, file_system = line.partition(" - ")
        kind, _, options = file_system.split(" ", 2)
        if kind not in ("cgroup", "cgroup2"):
            continue
        fields = mounted.split(" ")
        version = 1
        if kind == "cgroup2":
            version = 2
        mount = Mount(
            version=version,
            options=frozenset(options.split(",")),
            root=Path(_unescape(fields[3])),
            folder=Path(_unescape(fields[4])),
        )
        mounts.append(mount)
    return mounts


def _unescape(field: str) -> str:
    """Replace the octal codes of spaces and backslashes in a field of mountinfo."""
    return re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), field)


def _lines(path: Path) -> list[str]:
    if not path.is_file():
        return []
    return path.read_text(encoding="utf-8").splitlines()


def _words(path: Path) -> list[str]:
    """Return the words in a file of a cgroup, or an empty list if the file is missing or may not be read."""
    try:
        return path.read_text(encoding="utf-8").split()
    except OSError:
        return []

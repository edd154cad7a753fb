"""Memory and cores are those of the cgroup of this process and of its parents, not those of the host."""

import contextlib
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpt2_repro import cgroups, hardware
from tests.commands import ROOT


GB = 10**9
UNLIMITED = 9223372036854771712  # of version 1
V2 = "31 23 0:28 {root} {folder} rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"
MEMORY = "35 31 0:32 {root} {folder}/memory rw - cgroup cgroup rw,memory"
CPU = "32 31 0:29 {root} {folder}/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct"
CPUSET = "33 31 0:30 {root} {folder}/cpuset rw - cgroup cgroup rw,cpuset"
UNIFIED = "41 31 0:38 {root} {folder}/unified rw - cgroup2 cgroup2 rw"
ROOT_DISK = "23 1 254:0 / / rw,relatime - ext4 /dev/vda rw"


@dataclass
class Case:
    """A layout of cgroups.

    Args:
        lines: /proc/self/cgroup.
        mounts: /proc/self/mountinfo.
        root: the cgroup that is mounted.
        files: the files below /sys/fs/cgroup.
        expected: total memory, free memory and cores.
    """

    lines: list[str]
    mounts: list[str]
    files: dict[str, str]
    expected: tuple[int, int, int]
    root: str = "/"


HOST = (64 * GB, 60 * GB, 6)
# 8 of the 12 GB are files that were read once, such as a checkpoint that was resumed from.
USED = {"memory.current": str(12 * GB), "memory.stat": f"anon {4 * GB}\ninactive_file {8 * GB}"}
LIMITED = {"memory.max": str(16 * GB), "memory.high": "max", "cpu.max": "350000 100000", **USED}
USED_V1 = {
    "memory.usage_in_bytes": str(12 * GB),
    "memory.stat": f"inactive_file 0\ntotal_rss {4 * GB}\ntotal_inactive_file {8 * GB}",
}


def below(folder: str, files: dict[str, str]) -> dict[str, str]:
    return {f"{folder}/{name}": text for name, text in files.items()}


CASES = {
    "v2-no-limit": Case(
        ["0::/user.slice"], [V2], below("user.slice", {"memory.max": "max", "cpu.max": "max 100000", **USED}), HOST
    ),
    "v2-container": Case(["0::/"], [V2], LIMITED, (16 * GB, 12 * GB, 4)),
    # systemd-run --scope -p MemoryMax=8G: the scope has the limit, or a slice above it.
    "v2-systemd-scope": Case(
        ["0::/user.slice/run-r1.scope"],
        [V2],
        below("user.slice", {**LIMITED, "cpu.max": "max 100000"})
        | below("user.slice/run-r1.scope", {**LIMITED, "memory.max": str(8 * GB), "cpu.max": "150000 100000"}),
        (8 * GB, 4 * GB, 2),
    ),
    "v2-limit-of-a-parent": Case(
        ["0::/a/b/c"],
        [V2],
        below("a", LIMITED) | below("a/b/c", {"memory.max": str(32 * GB), "cpu.max": "max 100000", **USED}),
        (16 * GB, 12 * GB, 4),
    ),
    # Siblings use memory too, so the parent has less left than the own cgroup.
    "v2-siblings": Case(
        ["0::/a/b"],
        [V2],
        below("a", {"memory.max": str(20 * GB), "memory.current": str(18 * GB), "memory.stat": "inactive_file 0"})
        | below("a/b", LIMITED),
        (16 * GB, 2 * GB, 4),
    ),
    "v2-memory-high": Case(
        ["0::/a"], [V2], below("a", {**LIMITED, "memory.high": str(14 * GB)}), (14 * GB, 10 * GB, 4)
    ),
    # docker run --cgroupns=host: the container sees all cgroups of the host.
    "v2-docker-host-namespace": Case(
        ["0::/system.slice/docker-1f.scope"],
        [V2],
        below("system.slice/docker-1f.scope", LIMITED),
        (16 * GB, 12 * GB, 4),
    ),
    # A nested container: its own cgroup is mounted, but the path begins at the cgroup of the host.
    "v2-path-outside-of-the-mount": Case(
        ["0::/kubepods/pod1/1f"], [V2], LIMITED, (16 * GB, 12 * GB, 4), root="/machine/1f"
    ),
    "v2-path-outside-of-the-namespace": Case(["0::/../1f"], [V2], LIMITED, (16 * GB, 12 * GB, 4)),
    "v2-deleted-cgroup": Case(["0::/a/gone (deleted)"], [V2], below("a", LIMITED), (16 * GB, 12 * GB, 4)),
    "v2-escaped-root": Case(
        ["0::/my\\x2dpod/a b/job"],
        [V2],
        below("job", LIMITED),
        (16 * GB, 12 * GB, 4),
        root="/my\\134x2dpod/a\\040b",
    ),
    "v1-slurm": Case(
        ["5:memory:/slurm/uid_0/job_1/step_0", "4:cpuset:/slurm/uid_0/job_1", "2:cpu,cpuacct:/slurm/uid_0/job_1"],
        [MEMORY, CPUSET, CPU],
        below("memory", {"memory.limit_in_bytes": str(UNLIMITED), **USED_V1})
        | below("memory/slurm/uid_0/job_1", {"memory.limit_in_bytes": str(16 * GB), **USED_V1})
        | below("memory/slurm/uid_0/job_1/step_0", {"memory.limit_in_bytes": str(UNLIMITED), **USED_V1})
        | below("cpu,cpuacct/slurm/uid_0/job_1", {"cpu.cfs_quota_us": "350000", "cpu.cfs_period_us": "100000"}),
        (16 * GB, 12 * GB, 4),
    ),
    "v1-no-limit": Case(
        ["5:memory:/a", "2:cpu,cpuacct:/a"],
        [MEMORY, CPU],
        below("memory/a", {"memory.limit_in_bytes": str(UNLIMITED), **USED_V1})
        | below("cpu,cpuacct/a", {"cpu.cfs_quota_us": "-1", "cpu.cfs_period_us": "100000"}),
        HOST,
    ),
    # docker on version 1: the path is that of the host, and the container's own cgroup is mounted.
    "v1-docker": Case(
        ["5:memory:/docker/1f", "2:cpu,cpuacct:/docker/1f"],
        [MEMORY, CPU],
        below("memory", {"memory.limit_in_bytes": str(16 * GB), **USED_V1})
        | below("cpu,cpuacct", {"cpu.cfs_quota_us": "350000", "cpu.cfs_period_us": "100000"}),
        (16 * GB, 12 * GB, 4),
        root="/docker/1f",
    ),
    "hybrid": Case(
        ["9:name=systemd:/", "5:memory:/a/b", "3:cpuset:/", "0::/a/b"],
        [MEMORY, CPUSET, UNIFIED],
        below("memory/a", {"memory.limit_in_bytes": str(16 * GB), **USED_V1})
        | below("unified/a/b", {"cpu.max": "350000 100000"}),
        (16 * GB, 12 * GB, 4),
    ),
    "not-linux": Case([], [], {}, HOST),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_the_smallest_limit_counts(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proc, folder = tmp_path / "proc", tmp_path / "cgroup"
    memory = SimpleNamespace(total=HOST[0], available=HOST[1])
    monkeypatch.setattr(hardware.psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(hardware.os, "sched_getaffinity", lambda pid: set(range(HOST[2])))
    monkeypatch.setattr(cgroups, "PROC", proc)
    mounts = [mount.format(root=case.root, folder=folder) for mount in case.mounts]
    files = {folder / name: text for name, text in case.files.items()}
    if case.lines:
        files[proc / "cgroup"] = "\n".join(case.lines)
        files[proc / "mountinfo"] = "\n".join([ROOT_DISK, *mounts])
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n", encoding="utf-8")
    assert (hardware.total_memory(), hardware.available_memory(), hardware.cpu_cores()) == case.expected


@pytest.fixture
def limited_cgroup() -> Iterator[Path]:
    """Create a cgroup with 300 MB of memory, and one below it. Return the lower one's file with processes."""
    name = f"test-{uuid.uuid4().hex[:8]}"
    for root, limit in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
        upper = Path(root, name)
        with contextlib.suppress(OSError):
            (upper / "job").mkdir(parents=True)
        if (upper / limit).is_file():
            (upper / limit).write_text(str(300 << 20), encoding="utf-8")
            break
    else:
        pytest.skip("Creating a cgroup with a limit of memory needs root and a writable /sys/fs/cgroup.")
    yield upper / "job" / "cgroup.procs"
    (upper / "job").rmdir()
    upper.rmdir()


@pytest.mark.faults
def test_a_real_limit_of_a_parent_is_seen(limited_cgroup: Path) -> None:
    code = "from gpt2_repro import hardware; print(hardware.total_memory(), hardware.available_memory())"
    shell = f'echo $$ > {limited_cgroup} && exec {sys.executable} -c "{code}"'
    done = subprocess.run(["bash", "-c", shell], cwd=ROOT, capture_output=True, text=True, check=True)
    total, available = map(int, done.stdout.split())
    assert total == 300 << 20 and 0 < available < total

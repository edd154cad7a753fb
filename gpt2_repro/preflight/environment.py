"""Check a machine's packages, disks and limits, and run test commands."""

import logging
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from subprocess import PIPE, STDOUT
from typing import NamedTuple

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from gpt2_repro.launchers import ROOT
from gpt2_repro.planning.memory import MemoryTrial
from gpt2_repro.text import Finding, size


logger = logging.getLogger(__name__)


LEAST_SHARED_MEMORY = 1e9  # bytes, for NCCL and data loading; Docker's default is 64 MB
LEAST_OPEN_FILES = 4096
OUT_OF_MEMORY = re.compile(r"out of memory|ALLOC_FAILED|(allocate|enough) memory|MemoryError|SIGKILL", re.IGNORECASE)
TRIAL_SECONDS = 600.0  # timeout of a training of two steps
PACKAGES = ("torch", "transformers", "accelerate", "deepspeed", "datasets", "lm_eval")


def check_python() -> list[Finding]:
    """Check the versions of Python and of the packages that this project requires."""
    supported = sys.version_info >= (3, 11)
    python = platform.python_version() + ("" if supported else ": install Python 3.11 or newer")
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    needed = [Requirement(text) for line in lines if (text := line.partition("#")[0].strip())]
    checked = [_check_package(one) for one in needed if one.marker is None or one.marker.evaluate()]
    # Packages that are not in PACKAGES are listed only if their check fails.
    packages = [finding for finding in checked if finding.mark != "✓" or finding.about in PACKAGES]
    return [Finding("✓" if supported else "✗", "python", python), *packages]


def _check_package(needed: Requirement) -> Finding:
    try:
        installed = version(needed.name)
    except PackageNotFoundError:
        return Finding("✗", needed.name, "is not installed: run pip install -r requirements.txt")
    if needed.specifier.contains(installed, prereleases=True):
        return Finding("✓", needed.name, installed)
    least = SpecifierSet(",".join(str(part) for part in needed.specifier if part.operator == ">="))
    if not least.contains(installed, prereleases=True):
        return Finding("✗", needed.name, f"{installed} is older than {least}. Run pip install -r requirements.txt")
    return Finding("!", needed.name, f"{installed}, but the tests used {str(needed.specifier).removeprefix('==')}")


def check_limits(shared_memory: Path = Path("/dev/shm")) -> list[Finding]:
    """Check the size of the shared memory and the limit of open files."""
    shared = shutil.disk_usage(shared_memory).total if shared_memory.is_dir() else 0
    enough = shared >= LEAST_SHARED_MEMORY
    fix = "" if enough else ": NCCL and data loading need 1 GB; start the container with --shm-size 16g"
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    few = 0 <= files < LEAST_OPEN_FILES
    return [
        Finding("✓" if enough else "✗", "shared memory", f"{shared / 1e9:.1f} GB{fix}"),
        Finding("!" if few else "✓", "open files", f"limit {files}{': run ulimit -n 65536' if few else ''}"),
    ]


class Need(NamedTuple):
    """The number of bytes that a run will write to a folder, and for what purpose."""

    what: str
    folder: Path
    bytes: float


def check_room(needs: Sequence[Need]) -> list[Finding]:
    """Check that each file system has enough free space for the folders stored on it."""
    disks: dict[int, list[Need]] = {}
    for need in needs:
        disks.setdefault(_existing(need.folder).stat().st_dev, []).append(need)
    return [_check_disk(needs) for needs in disks.values()]


def _check_disk(needs: Sequence[Need]) -> Finding:
    folder = _existing(needs[0].folder)
    for need in needs:
        resolved = need.folder.resolve()
        if not os.access(_existing(resolved), os.W_OK) or any(map(Path.is_file, (resolved, *resolved.parents))):
            fix = "cannot be created or is not writable. Pass another --dataset_dir or --output_dir"
            return Finding("✗", "disk", f"The folder {need.folder} {fix}")
    free = shutil.disk_usage(folder).free
    needed = " and ".join(f"{size(need.bytes)} for {need.what} in {need.folder}" for need in needs)
    text = f"{size(free)} free; needed: {needed}"
    if free >= sum(need.bytes for need in needs):
        return Finding("✓", "disk", text)
    return Finding("✗", "disk", f"{text}. Use a larger disk, or pass another --dataset_dir or --output_dir")


def _existing(folder: Path) -> Path:
    """Return the folder if it exists, or else the nearest parent that exists."""
    resolved = folder.resolve()
    return next(path for path in (resolved, *resolved.parents) if path.is_dir())


def run_command(command: Sequence[str], seconds: float, **variables: str) -> tuple[int, str]:
    """Return a command's exit code (124 after `seconds`) and its output."""
    environment = os.environ | variables
    try:
        done = subprocess.run(command, stdout=PIPE, stderr=STDOUT, env=environment, errors="replace", timeout=seconds)
    except subprocess.TimeoutExpired:
        return 124, f"not finished after {seconds:.0f} s"
    return done.returncode, done.stdout


def error_in(output: str) -> str:
    """Return the first error message in a command's output, or the last line."""
    # The error is often not the last line, because a launcher prints a traceback after it.
    errors = re.findall(r"^(?:\[rank\d+\]: *)?(?:error: |[\w.]*(?:Error|Exception)\b).*", output, re.MULTILINE)
    return (errors or re.findall(r".*\w.*", output)[-1:] or ["no output"])[0].strip()


def try_training(command: Sequence[str], trial: MemoryTrial) -> Finding | None:
    """Return the result of a training command with the setting `trial`, or None if the memory is too small."""
    # A new process for each memory setting, because a process frees all its memory when it ends (llm.c, discussion 481).
    code, output = run_command([*command, *trial.options.split()], TRIAL_SECONDS)
    # Exit codes -9 and 137: the kernel killed the process because the machine ran out of memory.
    is_full = code in (-9, 137) or (code != 0 and OUT_OF_MEMORY.search(output) is not None)
    logger.info("  %s: %s", trial.options, "out of memory" if is_full else "failed" if code else "fits")
    if is_full:
        return None
    text = f"{trial.options} failed: {error_in(output)}" if code else f"fits: {trial.options}"
    return Finding("✗" if code else "✓", "memory", text)

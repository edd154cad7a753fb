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
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from subprocess import PIPE, STDOUT
from typing import NamedTuple

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from gpt2_repro.launchers import INSTALLED, ROOT
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
    is_supported = sys.version_info >= (3, 11)
    python = platform.python_version()
    if is_supported:
        findings = [Finding("✓", "python", python)]
    else:
        findings = [Finding("✗", "python", f"{python}: install Python 3.11 or newer")]
    for line in _requirements():
        text = line.partition("#")[0].strip()
        if not text:
            continue
        needed = Requirement(text)
        if needed.marker is None or needed.marker.evaluate():
            finding = _check_package(needed)
            # Packages that are not in PACKAGES are listed only if their check fails.
            if finding.mark != "✓" or needed.name in PACKAGES:
                findings.append(finding)
    return findings


def _requirements() -> list[str]:
    """Return the lines of requirements.txt. In a wheel, they are its metadata."""
    if INSTALLED:
        return requires("gpt2-repro") or []
    return (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()


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
    size_of_memory = shutil.disk_usage(shared_memory).total if shared_memory.is_dir() else 0
    text = f"{size_of_memory / 1e9:.1f} GB"
    if size_of_memory >= LEAST_SHARED_MEMORY:
        shared = Finding("✓", "shared memory", text)
    else:
        fix = "NCCL and data loading need 1 GB; start the container with --shm-size 16g"
        shared = Finding("✗", "shared memory", f"{text}: {fix}")
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if 0 <= limit < LEAST_OPEN_FILES:
        files = Finding("!", "open files", f"limit {limit}: run ulimit -n 65536")
    else:
        files = Finding("✓", "open files", f"limit {limit}")
    return [shared, files]


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
        is_below_file = any(path.is_file() for path in (resolved, *resolved.parents))
        if is_below_file or not os.access(_existing(resolved), os.W_OK):
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
    error = re.search(r"^(?:\[rank\d+\]: *)?(?:error: |[\w.]*(?:Error|Exception)\b).*", output, re.MULTILINE)
    if error:
        return error[0].strip()
    lines = re.findall(r".*\w.*", output)
    return lines[-1].strip() if lines else "no output"


def try_training(command: Sequence[str], trial: MemoryTrial) -> Finding | None:
    """Return the result of a training command with the setting `trial`, or None if the memory is too small."""
    # A new process for each memory setting, because a process frees all its memory when it ends (llm.c, discussion 481).
    code, output = run_command([*command, *trial.options.split()], TRIAL_SECONDS)
    # Exit codes -9 and 137: the kernel killed the process because the machine ran out of memory.
    if code in (-9, 137) or (code != 0 and OUT_OF_MEMORY.search(output)):
        logger.info("  %s: out of memory", trial.options)
        return None
    if code:
        logger.info("  %s: failed", trial.options)
        return Finding("✗", "memory", f"{trial.options} failed: {error_in(output)}")
    logger.info("  %s: fits", trial.options)
    return Finding("✓", "memory", f"fits: {trial.options}")

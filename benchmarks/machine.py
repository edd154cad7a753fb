"""Describe the machine, the packages and the command of a measurement."""

import datetime
import os
import platform
import re
import resource
import shlex
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def describe(*packages: str) -> str:
    """Return the date, the GPUs or the CPU, the load average of a minute, and the versions of installed packages."""
    versions = [f"{name} {found}" for name in packages if (found := version_of(name))]
    load = f"load {os.getloadavg()[0]:.1f}"
    return ", ".join([f"{datetime.date.today()}", device(), load, f"Python {platform.python_version()}", *versions])


def device() -> str:
    """Return the GPUs, if torch is imported and finds any, or the CPU."""
    torch, info = sys.modules.get("torch"), Path("/proc/cpuinfo")
    if torch and torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    names = re.findall(r"model name\s*: (.*)", info.read_text(encoding="utf-8")) if info.exists() else []
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores"


def cpu_seconds() -> float:
    """Return the CPU seconds of all child processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def print_header(*packages: str) -> None:
    """Print `describe` and the command of this process."""
    print(f"{describe(*packages)}\n`python {shlex.join(sys.argv)}`\n", flush=True)


def print_columns(*names: str) -> None:
    """Print the head of a Markdown table."""
    print_row(*names)
    print_row(*["---"] * len(names))


def print_row(*cells: object) -> None:
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def version_of(package: str) -> str:
    """Return the version of a package, or "" if the package is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""

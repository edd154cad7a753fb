"""Describe the machine and the packages of a measurement."""

import datetime
import os
import platform
import re
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def describe(*packages: str) -> str:
    """Return the date, the GPUs or the CPU, and the versions of the installed packages."""
    torch, info = sys.modules.get("torch"), Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", info.read_text(encoding="utf-8")) if info.exists() else []
    machine = f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores"
    if torch and torch.cuda.is_available():
        machine = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    versions = [f"{name} {found}" for name in packages if (found := version_of(name))]
    return ", ".join([f"{datetime.date.today()}", machine, f"Python {platform.python_version()}", *versions])


def version_of(package: str) -> str:
    """Return the version of a package, or "" if the package is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""

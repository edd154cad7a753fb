"""Whether a machine can do what a run will ask of it: versions, driver, memory for sharing, open files, secrets."""

import platform
import re
import resource
import shutil
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from gpt2_repro.preflight.findings import Finding


# The least major version of the NVIDIA driver that runs a CUDA of this major version (NVIDIA, CUDA compatibility).
DRIVERS = {11: 450, 12: 525, 13: 580}
LEAST_SHARED_MEMORY = 1e9  # NCCL and the readers of rows share through it; Docker's default is 64 MB
LEAST_OPEN_FILES = 4096
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


def check_secrets(environment: Mapping[str, str]) -> Finding:
    """Which secrets are there; never what they are."""
    there = [name for name in SECRETS if environment.get(name)]
    missing = [name for name in SECRETS if name not in there]
    words = f"{', '.join(there) or 'none'} set" + (f", {', '.join(missing)} not" if missing else "")
    return Finding("✓", "secrets", words)

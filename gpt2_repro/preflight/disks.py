"""Check that the disks have room for the data and the run."""

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from gpt2_repro.formatting import size
from gpt2_repro.preflight.findings import Finding


class Need(NamedTuple):
    """Bytes that a folder will receive."""

    what: str
    folder: Path
    bytes: float


def check_room(needs: Sequence[Need], *, volume_bytes: int | None = None) -> list[Finding]:
    """Check each file system for the room that its folders need.

    Args:
        needs: the data first.
        volume_bytes: rented size of the volume with the data; a network volume reports the size of the whole cluster.
    """
    places: dict[int, list[Need]] = {}
    for need in needs:
        places.setdefault(_existing(need.folder).stat().st_dev, []).append(need)
    return [_check_place(needs, None if number else volume_bytes) for number, needs in enumerate(places.values())]


def _check_place(needs: Sequence[Need], volume_bytes: int | None) -> Finding:
    there = _existing(needs[0].folder)
    for need in needs:
        inside = need.folder.resolve()
        if not os.access(_existing(inside), os.W_OK) or any(path.is_file() for path in (inside, *inside.parents)):
            return Finding("✗", "disk", f"{need.folder} cannot be created or written: pass another folder")
    if volume_bytes is None:
        free, how = shutil.disk_usage(there).free, "free"
    else:
        free, how = volume_bytes - _used_bytes(there), f"left of the volume's {size(volume_bytes)}"
    to_come = " and ".join(f"{size(need.bytes)} of {need.what} in {need.folder}" for need in needs)
    said = f"{size(max(0, free))} {how}, needed: {to_come}"
    if free >= sum(need.bytes for need in needs):
        return Finding("✓", "disk", said)
    return Finding("✗", "disk", f"{said}: rent a larger one, or pass another folder")


def _existing(folder: Path) -> Path:
    """Return the folder or its nearest existing parent, with links resolved."""
    resolved = folder.resolve()
    return next(path for path in (resolved, *resolved.parents) if path.is_dir())


def _used_bytes(folder: Path) -> int:
    """Return the bytes used on the file system of a folder, as `du` counts them."""
    mount = next(path for path in (folder, *folder.parents) if path.is_mount())
    command = ["du", "--summarize", "--one-file-system", "--block-size=1", str(mount)]
    return int(subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()[0])

"""Files that are there whole or not at all."""

import os
from pathlib import Path


def sync_folder(folder: Path) -> None:
    """Wait until all below `folder`, names and contents, is on the disk: a rename cannot outlive what it renames."""
    for path in [*folder.rglob("*"), folder]:
        if path.is_file() or path.is_dir():
            sync(path)


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: Path, content: str | bytes) -> None:
    """Write beside `path`, wait until it is on the disk, and rename: a reader sees the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def readable(folder: Path) -> None:
    """Give weights the permissions that other new files get: safetensors makes its files for their owner alone."""
    mask = os.umask(0)
    os.umask(mask)
    for path in folder.glob("*.safetensors"):
        path.chmod(0o666 & ~mask)

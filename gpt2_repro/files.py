"""Files that are there whole or not at all."""

import os
from pathlib import Path


def sync_folder(folder: Path) -> None:
    """Wait until every file below `folder` is on the disk, so that a rename cannot outlive its content."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def write_whole(path: Path, content: str | bytes) -> None:
    """Write beside `path`, wait until it is on the disk, and rename: a reader sees the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)

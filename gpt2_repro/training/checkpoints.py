"""Checkpoints that are complete or do not count: staged, described by a manifest written last, renamed into place."""

import hashlib
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

from gpt2_repro.files import sync_folder, write_whole


MANIFEST = "manifest.json"
# Must not begin with `checkpoint-`: what does is taken for a checkpoint by transformers' own tools.
STAGING = "staging"


def seal(folder: Path, *, trajectory: dict[str, Any]) -> None:
    """Write the manifest of a staged checkpoint: size and sha256 of each file. Everything reaches the disk first."""
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            files[str(path.relative_to(folder))] = {"bytes": path.stat().st_size, "sha256": digest}
    sync_folder(folder)
    write_whole(folder / MANIFEST, json.dumps({"trajectory": trajectory, "files": files}, indent=1))


def publish(staged: Path, target: Path) -> None:
    """Rename a sealed folder into place. An incomplete one of that name steps aside first."""
    if target.exists():
        aside = target.with_name(f"incomplete-{target.name}")
        shutil.rmtree(aside, ignore_errors=True)
        target.rename(aside)
    staged.rename(target)
    parent = os.open(target.parent, os.O_RDONLY)
    os.fsync(parent)
    os.close(parent)


def checkpoints(run: Path) -> list[Path]:
    """The folders named checkpoint-N, newest step first, complete or not."""
    return sorted((path for path in run.glob("checkpoint-*") if step_of(path) >= 0), key=step_of, reverse=True)


def step_of(checkpoint: Path) -> int:
    """N of checkpoint-N, -1 for a folder of another name."""
    match = re.fullmatch(r"checkpoint-(\d+)", checkpoint.name)
    return int(match[1]) if match else -1


def defect(checkpoint: Path, *, read_files: bool) -> str | None:
    """Why a checkpoint is not complete, or None. `read_files` also compares the hashes."""
    try:
        files = json.loads((checkpoint / MANIFEST).read_text())["files"]
    except FileNotFoundError:
        return "it has no manifest"
    except (ValueError, KeyError, TypeError):
        return "its manifest cannot be read"
    for name, expected in files.items():
        path = checkpoint / name
        if not path.is_file() or path.stat().st_size != expected["bytes"]:
            return f"{name} is missing or cut short"
        if read_files:
            with path.open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != expected["sha256"]:
                    return f"{name} is damaged"
    return None


def newest_complete(run: Path) -> tuple[Path | None, list[str]]:
    """The checkpoint to resume from, and a line on each newer one that was skipped."""
    skipped: list[str] = []
    for checkpoint in checkpoints(run):
        reason = defect(checkpoint, read_files=True)
        if reason is None:
            return checkpoint, skipped
        skipped.append(f"skipping {checkpoint}: {reason}")
    return None, skipped


def read_trajectory(checkpoint: Path) -> dict[str, Any]:
    """What a complete checkpoint says that a resumed run must share."""
    return json.loads((checkpoint / MANIFEST).read_text())["trajectory"]


def rotate(run: Path, *, keep: int) -> None:
    """Delete all but the newest `keep` complete checkpoints; 0 keeps all. Incomplete ones are left alone."""
    complete = [path for path in checkpoints(run) if defect(path, read_files=False) is None]
    for path in complete[keep:] if keep else []:
        path.rename(run / f"trash-{path.name}")  # first out of sight: a kill while deleting leaves no half checkpoint
    for trash in run.glob("trash-checkpoint-*"):
        shutil.rmtree(trash)

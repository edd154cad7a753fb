"""Find the checkpoints of a run, and read what a checkpoint records of its own training."""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from gpt2_repro.files import read_object


def checkpoints(run: Path) -> list[Path]:
    """Return the folders named checkpoint-N, newest step first, complete or not."""
    return sorted((path for path in run.glob("checkpoint-*") if step_of(path) >= 0), key=step_of, reverse=True)


def step_of(checkpoint: Path) -> int:
    """Return N of checkpoint-N, -1 for a folder of another name."""
    match = re.fullmatch(r"checkpoint-(\d+)", checkpoint.name)
    return int(match[1]) if match else -1


def manifest_hash(manifest: dict[str, Any]) -> str:
    """Return the sha256 of a manifest without its own `sha256`."""
    content = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def training_record(checkpoint: Path) -> dict[str, Any]:
    """Return what a `final/` or `checkpoint-N` records of its own training, {} if it has no intact manifest.

    The run's other files may describe a later state, after --extend_to or --resume_from. Keys: `tokens`; `losses`, of
    the validation at its step, by name; `environment`, as in environment.json; `sha256`, which identifies the record.
    """
    manifest = read_object(checkpoint / "manifest.json")
    if manifest.get("sha256") != manifest_hash(manifest):
        return {}
    if {"tokens", "losses", "environment"} <= manifest.keys():
        return manifest
    environment = read_object(checkpoint.parent / "environment.json")
    if not environment or "run_identity" not in manifest:
        return {}
    losses = {} if manifest.get("eval_loss") is None else {"eval_loss": manifest["eval_loss"]}
    return manifest | {"losses": losses, "environment": environment | {"run_identity": manifest["run_identity"]}}

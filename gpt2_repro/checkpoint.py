"""What a checkpoint records of its own training."""

from pathlib import Path
from typing import Any

from gpt2_repro.files import read_object


def training_record(checkpoint: Path) -> dict[str, Any]:
    """Return what a `final/` or `checkpoint-N` records of its own training, {} for any other folder.

    The run's other files may describe a later state, after --extend_to or --resume_from. Keys: `tokens`; `losses`, of
    the validation at its step, by name; `environment`, as in environment.json; `sha256`, which identifies the record.
    """
    manifest = read_object(checkpoint / "manifest.json")
    if {"tokens", "losses", "environment", "sha256"} <= manifest.keys():
        return manifest
    environment = read_object(checkpoint.parent / "environment.json")
    if not environment or "trajectory" not in manifest:
        return {}
    losses = {} if manifest.get("eval_loss") is None else {"eval_loss": manifest["eval_loss"]}
    return manifest | {"losses": losses, "environment": environment | {"trajectory": manifest["trajectory"]}}

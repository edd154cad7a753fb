"""Define the names of all files in a run directory, `runs/<name>/`, and which checkpoints stay there."""

import re
from pathlib import Path
from typing import NamedTuple


RECIPE = "recipe.yaml"  # the resolved recipe
ENVIRONMENT = "environment.json"  # versions, device, data, batch plan, run identity
STATUS = "run_status.json"  # state and progress
METRICS = "metrics.jsonl"  # one event per line
SAMPLES = "samples.jsonl"
CONSOLE = "console.log"  # what all ranks of all attempts printed
LOCK = ".lock"
SHARED = ".shared"  # shows for a moment whether the machines share the run directory
EVALUATION_FOLDER = "evaluation"  # a folder; --follow adds one for each checkpoint
COMPARISON = f"{EVALUATION_FOLDER}/comparison.json"
DIAGNOSIS = f"{EVALUATION_FOLDER}/diagnosis/diagnosis.json"
FINAL = "final"
CHECKPOINT_MANIFEST = "manifest.json"  # of a checkpoint or final/; written after all other files
# With --ema_steps, a checkpoint has a second file of weights, which transformers calls a variant.
AVERAGE_VARIANT = "average"
AVERAGED_WEIGHTS = f"model.{AVERAGE_VARIANT}.safetensors"
# Must not begin with `checkpoint-`, because transformers treats such folders as checkpoints.
STAGING = "staging"
TRASH = "trash"
RESTORING = ".restoring"  # prefix of a folder; hidden, so that a new run directory counts as empty


class Rotation(NamedTuple):
    """Which checkpoints of a run are kept, see `rotation.to_keep`."""

    keep: int
    keep_every: int = 0
    keep_best: bool = False


def checkpoint_path(run_directory: Path, step: int) -> Path:
    """Return the path of the folder of a run's checkpoint at `step`."""
    return run_directory / f"checkpoint-{step}"


def profile_path(run_directory: Path, step: int, ending: str) -> Path:
    """Return the path of a file with the profile of a step: its trace (`json.gz`) or its table (`txt`)."""
    return run_directory / f"profile-{step}.{ending}"


def step_of(checkpoint: Path) -> int:
    """Return N of checkpoint-N, or -1 for a folder with another name."""
    match = re.fullmatch(r"checkpoint-(\d+)", checkpoint.name)
    return int(match[1]) if match else -1


def checkpoints(run_directory: Path) -> list[Path]:
    """Return the checkpoint-N folders, complete or not, newest step first."""
    paths = [path for path in run_directory.glob("checkpoint-*") if step_of(path) >= 0]
    return sorted(paths, key=step_of, reverse=True)


def is_run(path: Path) -> bool:
    """Return whether a folder is a run directory."""
    return any((path / name).is_file() for name in (METRICS, STATUS, ENVIRONMENT, RECIPE))

"""Find a checkpoint by its folder, run or Hub id, without loading its weights."""

import dataclasses
import difflib
import glob
import logging
import re
from pathlib import Path
from typing import Literal

from gpt2_repro.errors import UserError, nearest
from gpt2_repro.hardware import check_hub
from gpt2_repro.manifest import SPLITS
from gpt2_repro.run_record import RunRecord
from gpt2_repro.run_record.checkpoints import complete_checkpoints, training_record
from gpt2_repro.run_record.environment import TrainingRecord
from gpt2_repro.run_record.layout import FINAL, MANIFEST, RECIPE, checkpoints, is_run, step_of


logger = logging.getLogger("gpt2_repro.run_record.checkpoint")

Form = Literal["training", "final", "folder", "hub"]


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk or on the Hub.

    Args:
        name: the name in tables, such as `final (runs/demo)`.
        source: the folder or Hub id to pass to `from_pretrained`.
        form: "training" (checkpoint-N of a run), "final" (final/ of a run), "folder" (another folder) or "hub".
        record: how the weights were trained, or None if unknown.
    """

    name: str
    source: str
    form: Form
    run: Path | None = None
    record: TrainingRecord | None = None

    @property
    def tokens_trained(self) -> int | None:
        """Number of target tokens that the model was trained on, or None if unknown."""
        return self.record.tokens if self.record else None

    def window(self, num_positions: int) -> int:
        """Return the sequence length of the training run, but at most `num_positions`.

        For a model without a run directory, return `num_positions`.
        """
        length = RunRecord(self.run).recipe().get("data", {}).get("sequence_length") if self.run else None
        return min(num_positions, int(length or num_positions))


def resolve_checkpoint(name: str, *, unfinished: bool = False) -> Checkpoint:
    """Return the checkpoint for `name`: a folder, a run directory or a Hub id.

    For a run directory, the result is `final/`. If `final/` does not exist and `unfinished` is true, the result is
    the newest complete checkpoint.

    Raises UserError if a run directory has no `final/` and `unfinished` is false. Also raises UserError for a folder
    without a model and for a path that does not exist.
    """
    path = Path(name)
    for folder in (path, path / FINAL):
        if (folder / "config.json").is_file():
            return _open_folder(folder)
    if (path / FINAL).is_dir():
        raise UserError(f"{path / FINAL} has no config.json, so it is damaged. Pass a checkpoint-N/ of the run.")
    if is_run(path):
        if not (newest := next(iter(complete_checkpoints(path)), None)):
            raise UserError(f"The run {name} has no complete checkpoint. Continue its training, or pass another run.")
        if not unfinished:
            raise UserError(
                f"The run {name} has no final/. Pass its newest checkpoint, {newest}, or finish its training."
            )
        logger.info("Run %s has no final/. Using its newest complete checkpoint: %s", name, newest.name)
        return _open_folder(newest)
    if not path.exists() and is_run(Path("runs", name)):
        raise UserError(f"Checkpoint not found: {name}. Did you mean runs/{name}?")
    if name == FINAL or (step_of(path) >= 0 and path.name == name):
        raise UserError(f"Checkpoint not found: {name}. Pass it with its run, such as runs/NAME/{name}.")
    near = difflib.get_close_matches(name, [str(run) for run in Path("runs").glob("*") if is_run(run)], 1, cutoff=0.85)
    if not path.exists() and near:
        raise UserError(f"Checkpoint not found: {name}. Did you mean {near[0]}?")
    if not path.exists() and glob.glob(name):
        raise UserError(f"Checkpoint not found: {name}. Write the pattern without quotes.")
    if not path.exists() and "," in name:
        raise UserError(f"Checkpoint not found: {name}. Separate several checkpoints with spaces.")
    if path.is_file() and not suggest_run(path):
        raise UserError(f"{name} is a file. Pass a run directory, a checkpoint-N/, a final/ or a Hub id.")
    if (
        path.exists()
        or name.startswith("runs/")
        or is_run(path.parent)
        or not re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?/?", name)
    ):
        fix = suggest_run(path) or "Pass a run directory, a checkpoint-N/, a final/ or a Hub id."
        raise UserError(f"Checkpoint not found: {name if name.strip('.') else repr(name)}. {fix}")
    check_hub()
    return Checkpoint(name.rstrip("/"), name, "hub")


def suggest_run(path: Path) -> str:
    """Return a sentence that suggests what to pass instead of `path`.

    The suggestion is a run directory or a checkpoint. If none is found, the result is "".
    """
    if (path / SPLITS).is_file():
        return f"{path} is a prepared folder. Train on it, and pass the run directory."
    if run := next(filter(is_run, path.parents), None):
        newest = next(iter(complete_checkpoints(run)), None) if step_of(path) >= 0 else None
        return f"The newest checkpoint of {run} is {newest}." if newest else f"Pass {run}."
    if runs := sorted(filter(is_run, path.glob("*"))):
        return f"Pass one of its runs, such as {runs[0]}."
    near = nearest(path.name, [run.name for run in path.parent.glob("*") if is_run(run)])
    return f"Did you mean {path.parent / near}?" if near else ""


def all_checkpoints(name: str) -> list[Checkpoint]:
    """Return the checkpoints of a run, sorted by step, with `final/` last.

    `name` is the run directory. A checkpoint-N without a manifest is omitted.

    Raises UserError if the run has no checkpoint.
    """
    run = Path(name)
    found = [path for path in reversed(checkpoints(run)) if (path / MANIFEST).is_file()]
    found += [path for path in [run / FINAL] if path.is_dir()]
    if not found:
        resolve_checkpoint(name)  # explains what `name` is
        fix = "Pass the directory of a run, or remove --all_checkpoints."
        raise UserError(f"{name} is a single model, not a run with checkpoints. {fix}")
    return [resolve_checkpoint(str(path)) for path in found]


def _open_folder(folder: Path) -> Checkpoint:
    run, record = folder.parent, training_record(folder)
    if not (run / RECIPE).is_file():
        return Checkpoint(str(folder), str(folder), "folder", record=record)
    name = f"{folder.name} ({run if run.name else run.resolve().name})"
    form: Form = "final" if folder.name == FINAL else "training" if step_of(folder) >= 0 else "folder"
    return Checkpoint(name, str(folder), form, run, record)

"""Find a checkpoint by its folder, run or Hub id, without loading its weights."""

import dataclasses
import logging
import re
from pathlib import Path

from gpt2_repro.checkpoints.manifest import read_manifest, training_record
from gpt2_repro.checkpoints.rotation import newest_checkpoint
from gpt2_repro.errors import UserError, nearest
from gpt2_repro.hub import check_hub
from gpt2_repro.run_record import RunRecord
from gpt2_repro.run_record.environment import TrainingRecord
from gpt2_repro.run_record.layout import FINAL, RECIPE, is_run, step_of


logger = logging.getLogger(__name__)

FILES = (".pt", ".bin")  # of nanoGPT and llm.c
HUB_ID = re.compile(r"\w[\w.-]*(/[\w.-]+)?/?")


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk or on the Hub. What is unknown is None."""

    name: str  # in tables, such as `final (runs/demo)`
    source: str  # the folder or Hub id to pass to `from_pretrained`
    run_directory: Path | None = None
    record: TrainingRecord | None = None  # how the weights were trained
    copy: str = ""  # the folder to load instead of `source`

    @property
    def tokens_trained(self) -> int | None:
        """Target tokens that the model was trained on, or None if unknown."""
        if self.record is None:
            return None
        return self.record.tokens

    @property
    def weights(self) -> str:
        """Which weights of a run with --ema_steps these are, or "" for other runs."""
        if self.record is None:
            return ""
        return self.record.weights

    def log_weights(self) -> None:
        """Log which weights of a run with --ema_steps are used. Weights that are no average cause a warning."""
        if self.record is not None and self.weights:
            level = logging.WARNING
            if self.record.averaged:
                level = logging.INFO
            logger.log(level, "The weights of %s are %s.", self.name, self.weights)

    def window(self, num_positions: int) -> int:
        """Return the sequence length of the model's run, but at most `num_positions`."""
        if self.run_directory is None:
            return num_positions
        recipe = RunRecord(self.run_directory).recipe()
        length = recipe.get("data", {}).get("sequence_length")
        if not length:
            return num_positions
        return min(num_positions, int(length))


def resolve_checkpoint(name: str, *, unfinished: bool = False) -> Checkpoint:
    """Return the checkpoint for a folder, a run directory or a Hub id, or raise UserError.

    For a run directory, the result is `final/`, or the newest complete checkpoint if that is newer. Without `final/`,
    `unfinished` selects the newest complete checkpoint.
    """
    path = Path(name)
    if (path / "config.json").is_file():
        return _open_folder(path)
    if (path / FINAL / "config.json").is_file():
        newer = newer_than_final(path)
        if newer is None:
            return _open_folder(path / FINAL)
        logger.info("Run %s has continued after final/. Using its newest complete checkpoint: %s", name, newer.name)
        return _open_folder(newer)
    if is_run(path):
        newest = newest_checkpoint(path)
        if newest is None or not unfinished:
            raise UserError(f"The run {name} has no complete final/. Its newest complete checkpoint: {newest}.")
        logger.info("Run %s has no final/. Using its newest complete checkpoint: %s", name, newest.name)
        return _open_folder(newest)
    if path.is_file() and path.suffix in FILES:
        return Checkpoint(name, name)
    if path.exists():
        raise UserError(f"{name} is not a run directory, a checkpoint or a model folder.")
    is_hub_id = HUB_ID.fullmatch(name) and path.parts[0] != "runs"
    if is_run(path.parent) or is_run(Path("runs", name)) or not is_hub_id:
        raise UserError(f"{name} does not exist. {suggest_run(path)}")
    check_hub()
    return Checkpoint(name.rstrip("/"), name)


def newer_than_final(run_directory: Path) -> Path | None:
    """Return the newest complete checkpoint of a run that has continued after it wrote final/, otherwise None."""
    newest = newest_checkpoint(run_directory)
    ended = read_manifest(run_directory / FINAL).get("step")
    if newest is None or ended is None:
        return None
    status = RunRecord(run_directory).status()
    went_back = status.state != "complete" and status.step is not None and status.step < ended
    if step_of(newest) > ended or went_back:
        return newest
    return None


def suggest_run(path: Path) -> str:
    """Return a sentence that names the run or checkpoint with the nearest name."""
    names: list[str] = []
    for folder in (*path.parent.glob("*"), *Path("runs").glob("*")):
        if is_run(folder) or is_run(folder.parent):
            names.append(str(folder))
    near = nearest(str(path), names)
    if not near:
        return ""
    return f"Did you mean {near}?"


def _open_folder(folder: Path) -> Checkpoint:
    run_directory = folder.parent
    record = training_record(folder)
    if not (run_directory / RECIPE).is_file():
        return Checkpoint(str(folder), str(folder), record=record)
    run_name = str(run_directory)
    if not run_directory.name:
        run_name = run_directory.resolve().name
    return Checkpoint(f"{folder.name} ({run_name})", str(folder), run_directory, record)

"""Find a checkpoint by its folder, run or Hub id, without loading its weights."""

import dataclasses
import logging
import re
from pathlib import Path

from gpt2_repro.checkpoints import complete_checkpoints, training_record
from gpt2_repro.errors import UserError, nearest
from gpt2_repro.hub import check_hub
from gpt2_repro.run_record import RunRecord
from gpt2_repro.run_record.environment import TrainingRecord
from gpt2_repro.run_record.layout import FINAL, RECIPE, is_run


logger = logging.getLogger(__name__)

FILES = (".pt", ".bin")  # of nanoGPT and llm.c
HUB_ID = re.compile(r"\w[\w.-]*(/[\w.-]+)?/?")


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk or on the Hub. What is unknown is None."""

    name: str  # in tables, such as `final (runs/demo)`
    source: str  # the folder or Hub id to pass to `from_pretrained`
    run: Path | None = None
    record: TrainingRecord | None = None  # how the weights were trained
    copy: str = ""  # the folder to load instead of `source`

    @property
    def tokens_trained(self) -> int | None:
        """Target tokens that the model was trained on, or None if unknown."""
        return self.record.tokens if self.record else None

    def window(self, num_positions: int) -> int:
        """Return the sequence length of the model's run, but at most `num_positions`."""
        length = RunRecord(self.run).recipe().get("data", {}).get("sequence_length") if self.run else None
        return min(num_positions, int(length or num_positions))


def resolve_checkpoint(name: str, *, unfinished: bool = False) -> Checkpoint:
    """Return the checkpoint for a folder, a run directory or a Hub id, or raise UserError.

    For a run directory, the result is `final/`. Without `final/`, `unfinished` selects the newest complete checkpoint.
    """
    path = Path(name)
    for folder in (path, path / FINAL):
        if (folder / "config.json").is_file():
            return _open_folder(folder)
    if is_run(path):
        newest = next(iter(complete_checkpoints(path)), None)
        if newest is None or not unfinished:
            raise UserError(f"The run {name} has no complete final/. Its newest complete checkpoint: {newest}.")
        logger.info("Run %s has no final/. Using its newest complete checkpoint: %s", name, newest.name)
        return _open_folder(newest)
    if path.is_file() and path.suffix in FILES:
        return Checkpoint(name, name)
    if path.exists():
        raise UserError(f"{name} is not a run directory, a checkpoint or a model folder.")
    if is_run(path.parent) or is_run(Path("runs", name)) or not HUB_ID.fullmatch(name) or path.parts[0] == "runs":
        raise UserError(f"{name} does not exist. {suggest_run(path)}")
    check_hub()
    return Checkpoint(name.rstrip("/"), name)


def suggest_run(path: Path) -> str:
    """Return a sentence that names the run or checkpoint with the nearest name."""
    runs = [*path.parent.glob("*"), *Path("runs").glob("*")]
    near = nearest(str(path), [str(near) for near in runs if is_run(near) or is_run(near.parent)])
    return f"Did you mean {near}?" if near else ""


def _open_folder(folder: Path) -> Checkpoint:
    run, record = folder.parent, training_record(folder)
    if not (run / RECIPE).is_file():
        return Checkpoint(str(folder), str(folder), record=record)
    return Checkpoint(f"{folder.name} ({run if run.name else run.resolve().name})", str(folder), run, record)

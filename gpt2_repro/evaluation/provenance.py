"""Where a checkpoint comes from: its run, the window and the tokens it was trained on, and its name in a table."""

import dataclasses
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpt2_repro.errors import UserError
from gpt2_repro.run_record import RunRecord
from gpt2_repro.run_record.checkpoints import training_record
from gpt2_repro.run_record.layout import FINAL, MANIFEST, checkpoints, run_of


logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class CheckpointInfo:
    """What is known of a checkpoint without loading it."""

    name: str
    source: str  # a folder or a Hub id
    run: Path | None
    sequence_length: int | None  # tokens; None outside a run
    record: dict[str, Any]  # what the checkpoint records of its training; {} outside a run

    @property
    def tokens_trained(self) -> int | None:
        """Targets up to this checkpoint, None if unknown."""
        return self.record.get("tokens")

    def window(self, num_positions: int) -> int:
        """The tokens it was trained to see at once: its positions, or its run's shorter sequences."""
        return min(num_positions, self.sequence_length or num_positions)


def common_window(asked: int, trained: Mapping[str, int], positions: Mapping[str, int], *, insist: bool) -> int:
    """The widest window up to `asked` that every model was trained on.

    Args:
        positions: of each model, beyond which it computes nothing.
        insist: the number was typed: take it where the models have positions for it, trained or not.
    """
    name = min(trained, key=lambda model: trained[model])
    window = min(asked, trained[name])
    if insist and window < asked <= min(positions.values()):
        logger.warning("window %d tokens: %s was trained on %d, its later positions are random", asked, name, window)
        return asked
    if window < asked:
        logger.warning("window %d tokens in place of %d: %s was trained on no more", window, asked, name)
    return window


def expand_checkpoints(name: str, *, every: bool) -> list[str]:
    """The checkpoints that a word of the command line means: itself, or `every` complete one of a run by step, and its final/.

    Raises UserError for what is no run where every one is asked for.
    """
    if not every:
        return [name]
    run = Path(name)
    found = [path for path in reversed(checkpoints(run)) if (path / MANIFEST).is_file()]
    found += [path for path in [run / FINAL] if path.is_dir()]
    if not found:
        raise UserError(f"--all_checkpoints: {name} is no run with checkpoints")
    return [str(path) for path in found]


def inspect_checkpoint(source: str) -> CheckpointInfo:
    """The provenance of a folder or Hub id. A checkpoint belongs to the run in whose folder it lies."""
    folder = Path(source)
    run = run_of(folder)
    if run is None:
        return CheckpointInfo(source.rstrip("/"), source, run=None, sequence_length=None, record={})
    shown = run if run.name else run.resolve().name
    length = RunRecord(run).recipe().get("data", {}).get("sequence_length")
    length = None if length is None else int(length)
    return CheckpointInfo(f"{folder.name} ({shown})", source, run, length, training_record(folder))


def default_output_dir(first: CheckpointInfo, *, smoke_test: bool = False) -> Path:
    """Beside the first checkpoint's run, or under evaluations/ for a model without one; a smoke test is no result."""
    folder = first.run / "evaluation" if first.run else Path("evaluations") / file_name(first.source)
    return folder / "smoke_test" if smoke_test else folder


def file_name(name: str) -> str:
    """A model's name as a file name."""
    return re.sub(r"[^\w.]+", "-", name).strip("-.")

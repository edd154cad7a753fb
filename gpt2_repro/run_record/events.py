"""Events of a run, one JSON object per line: metrics and samples."""

import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gpt2_repro.files import append_line, write_whole


logger = logging.getLogger(__name__)

Event = dict[str, Any]


def append(path: Path, event: Event) -> None:
    """Append one event. If the disk is full, the event is lost and the run continues."""
    try:
        append_line(path, json.dumps(event, ensure_ascii=False))
    except OSError as error:
        logger.warning("%s: an event of step %s is lost (%s)", path, event.get("step"), error.strerror)


def read(path: Path) -> tuple[list[Event], int]:
    """Return the events of a file, and how many lines before the last are damaged.

    A killed run leaves a torn last line. A run resumed from it may have continued that line.
    """
    lines = _read(path)
    return [event for event in lines if event is not None], lines[:-1].count(None)


def rewind(path: Path, step: int, *, validates_again: bool) -> None:
    """Drop the events after `step`, and the validation at `step` if it is repeated. Damaged lines are dropped too."""

    def stays(event: Event) -> bool:
        again = validates_again and ("eval_loss" in event or "text" in event)
        at = event.get("step")
        return isinstance(at, int) and (at < step or (at == step and not again))

    if path.is_file():
        kept = [json.dumps(event, ensure_ascii=False) for event in read(path)[0] if stays(event)]
        write_whole(path, "".join(f"{line}\n" for line in kept))


def _read(path: Path) -> list[Event | None]:
    """Return the object of each line that is not empty, None for a damaged line. Only "\\n" ends a line."""
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n") if path.is_file() else []
    events: list[Event | None] = []
    for line in filter(None, lines):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            value = None
        events.append(value if isinstance(value, dict) else None)
    return events


def validation_losses(events: Iterable[Event], step: int | None = None) -> dict[str, float]:
    """Return the losses by name of the last validation, or of the one at `step`; {} if there was none."""
    losses: dict[str, float] = {}
    for event in events:
        if "eval_loss" in event and step in (None, event.get("step")):
            losses |= {key: value for key, value in event.items() if key.endswith("_loss")}
    return losses

"""Events of a run, one JSON object per line: metrics and samples."""

import json
import logging
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
    events = [event for _, event in _read(path)]
    return [event for event in events if event is not None], events[:-1].count(None)


def rewind(path: Path, step: int, *, validates_again: bool) -> None:
    """Drop the events after `step`, and the validation at `step` if it is repeated. Damaged lines are dropped too."""

    def stays(event: Event) -> bool:
        again = validates_again and ("eval_loss" in event or "text" in event)
        at = event.get("step")
        return isinstance(at, int) and (at < step or (at == step and not again))

    if path.is_file():
        write_whole(path, "".join(f"{line}\n" for line, event in _read(path) if event is not None and stays(event)))


def _read(path: Path) -> list[tuple[str, Event | None]]:
    """Return each line that is not empty and its object, None if it is damaged. Only "\\n" ends a line."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    return [(line, _parse(line)) for line in text.split("\n") if line]


def _parse(line: str) -> Event | None:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None

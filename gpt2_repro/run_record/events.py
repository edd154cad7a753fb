"""Append, read and delete the events of a run.

An event is a logged step, a validation or a generated text, stored as one line of JSON.
"""

import logging
import re
from pathlib import Path
from typing import Any, TypeGuard

from gpt2_repro.files import append_line, parse_object, to_json, write_whole


logger = logging.getLogger(__name__)

Event = dict[str, Any]


def is_number(value: object) -> TypeGuard[float]:
    """Return whether `value` is a number that can be plotted: between -1e30 and 1e30."""
    if isinstance(value, bool):
        return False
    return isinstance(value, int | float) and -1e30 < value < 1e30


def append(path: Path, event: Event) -> None:
    """Append an event to a file. If the disk is full, log a warning and continue."""
    line = to_json(event, ensure_ascii=False)
    try:
        append_line(path, line)
    except OSError as error:
        text = "Could not write the log entry of step %s to %s (%s). Training continues."
        logger.warning(text, event.get("step"), path, error.strerror)


def read(path: Path) -> tuple[list[Event], int]:
    """Return the events of a file, and the number of damaged lines.

    An incomplete last line is not counted, because a killed process can leave one.
    """
    found: list[Event] = []
    damaged = 0
    for line, event in _read(path):
        if event is not None:
            found.append(event)
        elif line.endswith("\n"):
            damaged += 1
    return found, damaged


def last_step(path: Path) -> int:
    """Return the highest step of a file's events, 0 without one."""
    last = 0
    events, _ = read(path)
    for event in events:
        step = event.get("step")
        if isinstance(step, int):
            last = max(last, step)
    return last


LOSSES = ("_loss", "_bits_per_byte")  # ends of the keys of validation losses
AVERAGED = "eval_EMA"  # instead of "eval", for losses of the averaged weights


def validation_losses(path: Path, step: int | None = None) -> dict[str, float | None]:
    """Return the losses (None if not finite) of the validation at `step`, or the last one."""
    losses: dict[str, float | None] = {}
    events, _ = read(path)
    for event in events:
        is_chosen = step is None or step == event.get("step")
        if "eval_loss" not in event or not is_chosen:
            continue
        for key, value in event.items():
            if not key.endswith(LOSSES):
                continue
            losses[key] = None
            if is_number(value):
                losses[key] = value
    return losses


def model_losses(path: Path, step: int, *, averaged: bool) -> dict[str, float]:
    """Return the finite validation losses of a saved model at `step`, under the keys of a run without an average.

    Args:
        averaged: whether the model has the average of the weights.
    """
    losses: dict[str, float] = {}
    for key, loss in validation_losses(path, step).items():
        is_averaged = key.startswith(AVERAGED)
        if is_averaged == averaged and loss is not None:
            key = key.replace(AVERAGED, "eval")
            losses[key] = loss
    return losses


def rewind(path: Path, step: int, *, validates_again: bool) -> None:
    """Delete the events after `step` and all damaged lines from a file.

    With `validates_again`, the validation and the samples at `step` are also deleted.
    """

    def stays(event: Event) -> bool:
        at = event.get("step")
        if not isinstance(at, int):
            return False
        if at == step and validates_again:
            return "eval_loss" not in event and "text" not in event
        return at <= step

    if not path.is_file():
        return
    text = ""
    for line, event in _read(path):
        if event is not None and stays(event):
            text += line.removesuffix("\n")
            text += "\n"
    write_whole(path, text)


def _read(path: Path) -> list[tuple[str, Event | None]]:
    """Return each non-empty line of a file with its JSON object, or None if damaged."""
    if not path.is_file():
        return []
    text = path.read_text(encoding="utf-8", errors="replace")
    # Only "\n" ends a line. str.splitlines() would also split at other Unicode line breaks.
    lines = re.findall(r"[^\n]+\n?", text)
    return [(line, parse_object(line)) for line in lines]

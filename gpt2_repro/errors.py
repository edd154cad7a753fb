"""Define exceptions with one-line messages, and suggest words for misspellings."""

import difflib
import re
import traceback
from collections.abc import Iterable
from pathlib import Path


PACKAGE = Path(__file__).parent


class UserError(Exception):
    """A mistake that the user can fix. Commands print one line and exit with code 2."""


class BadCheckpoint(UserError):
    """A checkpoint that cannot be loaded. A command for several checkpoints may continue with the others."""


class RunFailed(Exception):
    """The failure of a run. Commands print one line and exit with code 1."""


class Diverged(RunFailed):
    """Training diverged: gradients were not finite. A restart would fail again."""


def in_a_line(error: object) -> str:
    """Return an error's message on one line, or the name of its class."""
    return " ".join(str(error).split())[:300] or type(error).__name__


def raised_at(error: BaseException) -> str:
    """Return the newest line of this package in an error's traceback, such as `training/trainer.py:123`."""
    place = ""
    for frame in traceback.extract_tb(error.__traceback__):
        path = Path(frame.filename)
        if PACKAGE in path.parents or not place:
            place = f"{path.parent.name}/{path.name}:{frame.lineno}"
    return place


def error_number(error: BaseException) -> int | None:
    """Return the errno of an exception, or None. Works for tokenizers and safetensors."""
    # Their exceptions have no errno. Only the text contains, for example, "os error 28".
    number = getattr(error, "errno", None)
    if number:
        return number
    match = re.search(r"os error (\d+)", str(error))
    return int(match[1]) if match else None


def nearest(word: str, valid: Iterable[str]) -> str | None:
    """Return the valid word that is nearest to `word`, or None if no word is similar."""
    matches = difflib.get_close_matches(word, list(valid), n=1)
    return matches[0] if matches else None


def did_you_mean(word: str, valid: Iterable[str]) -> str:
    """Return a sentence that names the valid word that is nearest to `word`, or all if they are few."""
    choices = [str(choice) for choice in valid]
    match = nearest(word, choices)
    if match:
        return f"Did you mean {match!r}?"
    if len(choices) < 30:
        return f"Valid: {', '.join(choices)}."
    return "Pass --help to list the valid names."

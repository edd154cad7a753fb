"""Define exceptions with one-line messages, and suggest words for misspellings."""

import difflib
import re
from collections.abc import Iterable


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


def error_number(error: BaseException) -> int | None:
    """Return the errno of an exception, or None. Works for tokenizers and safetensors."""
    # Their exceptions have no errno. Only the text contains, for example, "os error 28".
    match = re.search(r"os error (\d+)", str(error))
    return getattr(error, "errno", None) or (int(match[1]) if match else None)


def nearest(word: str, valid: Iterable[str]) -> str | None:
    """Return the valid word that is nearest to `word`, or None if no word is similar."""
    return next(iter(difflib.get_close_matches(word, list(valid), n=1)), None)


def did_you_mean(word: str, valid: Iterable[str]) -> str:
    """Return a sentence that names the valid word that is nearest to `word`, or all if they are few."""
    choices = list(map(str, valid))
    if near := nearest(word, choices):
        return f"Did you mean {near!r}?"
    return f"Valid: {', '.join(choices)}." if len(choices) < 30 else "Pass --help to list the valid names."

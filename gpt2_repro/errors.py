"""Define exceptions with one-line messages, and suggest words for misspellings."""

import difflib
import re
from collections.abc import Iterable, Sequence


MANY = 30  # a message does not list this many choices or more


class UserError(Exception):
    """A mistake that the user can fix. Commands print one line and exit with code 2."""


class RunFailed(Exception):
    """The failure of a run. Commands print one line and exit with code 1."""


class Diverged(RunFailed):
    """Training diverged: gradients were not finite. A restart would fail again."""


def in_a_line(error: object) -> str:
    """Return an error's message on one line.

    If the message is empty, return the name of the error's class.
    """
    return " ".join(str(error).split())[:300] or type(error).__name__


def nearest(word: str, valid: Iterable[str]) -> str | None:
    """Return the valid word that is nearest to `word`, or None if no word is similar.

    If `word` abbreviates a valid word, this valid word is preferred to similar words. For example, `attn` abbreviates
    `attn_implementation`.
    """
    choices = list(valid) if isinstance(valid, Sequence) else sorted(valid)
    parts = word.lstrip("-").lower().replace("-", "_").split("_")
    begins = re.compile("-*(.*_)?" + "[a-z0-9]*_(.*_)?".join(map(re.escape, parts)) + "[a-z0-9]*(_.*)?")
    abbreviated = [choice for choice in choices if len(parts[0]) > 1 and begins.fullmatch(choice.lower())]
    abbreviated.sort(key=lambda choice: not choice.lower().lstrip("-").startswith(parts[0]))
    return next(iter(abbreviated or difflib.get_close_matches(word, choices, n=1, cutoff=0.7)), None)


def did_you_mean(word: str, valid: Iterable[str]) -> str:
    """Return a sentence that suggests valid words for an unknown word."""
    choices = list(valid) if isinstance(valid, Sequence) else sorted(valid)
    if near := nearest(word, choices):
        return f"Did you mean {near!r}?"
    return f"Valid choices: {', '.join(choices)}." if len(choices) < MANY else "Pass --help all to list valid names."

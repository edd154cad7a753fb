"""What a user did wrong, in one line that also says what to type instead."""

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """A mistake that the user can fix. Entry points print it as one line and exit with code 2."""


class RunFailed(Exception):
    """A failure that one line explains better than a traceback. Entry points exit with code 1."""


class Diverged(RunFailed):
    """A run that would fail in the same way when it is started again."""


def in_a_line(error: Exception) -> str:
    """Return the message of `error` on one line, or its class name if it has none."""
    return " ".join(str(error).split())[:300] or type(error).__name__


def did_you_mean(word: str, valid: Iterable[str]) -> str:
    """The end of a message about an unknown `word`: the nearest of the `valid` ones, or all of them if none is near."""
    choices = sorted(set(valid))
    near = difflib.get_close_matches(word, choices, n=1, cutoff=0.6)
    return f"did you mean {near[0]!r}?" if near else f"valid are: {', '.join(choices)}"

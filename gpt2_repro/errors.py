"""What a user did wrong, in one line that also says what to type instead."""

import difflib
import re
from collections.abc import Iterable, Sequence


MANY = 30  # choices are not listed in a message


class UserError(Exception):
    """A mistake that the user can fix. Entry points print it as one line and exit with code 2."""


class RunFailed(Exception):
    """A failure that one line explains better than a traceback. Entry points exit with code 1."""


class Diverged(RunFailed):
    """A run that would fail in the same way when it is started again."""


def in_a_line(error: Exception) -> str:
    """Return the message of `error` on one line, or its class name if it has none."""
    return " ".join(str(error).split())[:300] or type(error).__name__


def nearest(word: str, valid: Iterable[str]) -> str | None:
    """Return the valid word that `word` abbreviates (attn: attn_implementation), or the most similar one, or None."""
    choices = list(valid) if isinstance(valid, Sequence) else sorted(valid)
    parts = word.lstrip("-").lower().replace("-", "_").split("_")
    begins = re.compile("-*(.*_)?" + "[a-z0-9]*_(.*_)?".join(map(re.escape, parts)) + "[a-z0-9]*(_.*)?")
    abbreviated = [choice for choice in choices if len(parts[0]) > 1 and begins.fullmatch(choice.lower())]
    abbreviated.sort(key=lambda choice: not choice.lower().lstrip("-").startswith(parts[0]))
    return next(iter(abbreviated or difflib.get_close_matches(word, choices, n=1)), None)


def did_you_mean(word: str, valid: Iterable[str]) -> str:
    """Return the end of a message about an unknown `word`: the nearest of the `valid` ones, or all of them."""
    choices = list(valid) if isinstance(valid, Sequence) else sorted(valid)
    if near := nearest(word, choices):
        return f"did you mean {near!r}?"
    return f"valid are: {', '.join(choices)}" if len(choices) < MANY else "list the valid ones with --help all"

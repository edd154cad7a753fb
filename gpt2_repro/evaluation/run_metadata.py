"""The stamp that the files of an evaluation carry."""

import shlex
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from gpt2_repro.formatting import now


LIBRARIES = ("lm_eval", "transformers", "torch", "datasets")


def command_metadata(command: str, argv: Sequence[str]) -> dict[str, Any]:
    """What was run, when and with which libraries. `command` is what a user types before the arguments."""
    return {
        "date": now(),
        "command": f"{command} {shlex.join(argv)}",
        "versions": {library: version(library) for library in LIBRARIES},
    }

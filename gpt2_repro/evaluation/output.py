"""What an evaluation writes: its folder, the names of files, and the metadata that they carry."""

import re
import shlex
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from gpt2_repro.evaluation.models import CheckpointInfo
from gpt2_repro.formatting import now


LIBRARIES = ("lm_eval", "transformers", "torch", "datasets")


def default_output_dir(first: CheckpointInfo, *, smoke_test: bool = False) -> Path:
    """Beside the first checkpoint's run, or under evaluations/ for a model without one; a smoke test is no result."""
    folder = first.run / "evaluation" if first.run else Path("evaluations") / file_name(first.source)
    return folder / "smoke_test" if smoke_test else folder


def file_name(name: str) -> str:
    """A model's name as a file name."""
    return re.sub(r"[^\w.]+", "-", name).strip("-.")


def command_metadata(command: str, argv: Sequence[str]) -> dict[str, Any]:
    """What was run, when and with which libraries. `command` is what a user types before the arguments."""
    return {
        "date": now(),
        "command": f"{command} {shlex.join(argv)}",
        "versions": {library: version(library) for library in LIBRARIES},
    }

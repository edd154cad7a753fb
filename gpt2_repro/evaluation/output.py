"""Files of an evaluation, each complete or absent, and the stamp they carry."""

import datetime
import json
import os
import shlex
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any


LIBRARIES = ("lm_eval", "transformers", "torch", "datasets")


def stamp(argv: Sequence[str]) -> dict[str, Any]:
    """What was run, when and with which libraries."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": f"bash evaluate.sh {shlex.join(argv)}",
        "versions": {library: version(library) for library in LIBRARIES},
    }


def write_json(path: Path, content: Any) -> None:
    """Write `content` as JSON, complete or not at all."""
    write_text(path, json.dumps(content, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write `text` beside `path` and rename it into place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)

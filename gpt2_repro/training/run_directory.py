"""The run directory is the record of a run: who writes it, what it is, how far it is, what it measured."""

import datetime
import fcntl
import json
import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TextIO

from gpt2_repro.errors import UserError
from gpt2_repro.files import write_whole


STATUS = "run_status.json"
PACKAGES = ("torch", "transformers", "accelerate", "deepspeed", "datasets", "tokenizers", "flash-attn")


class RunDirectory:
    """`runs/<name>/`. Only rank 0 writes; `lock` keeps a second job out."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self._lock: TextIO | None = None

    def lock(self) -> None:
        """Hold the directory until this process ends. Raises UserError where another job holds it."""
        self.path.mkdir(parents=True, exist_ok=True)
        lock = (self.path / ".lock").open("a+")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.seek(0)
            holder = lock.read().strip() or "unknown"
            raise UserError(f"{self.path} is being written by {holder}: end it or name another --output_dir") from None
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {platform.node()}")
        lock.flush()
        self._lock = lock

    def is_finished(self, max_steps: int) -> bool:
        """Whether the run is complete. Raises UserError where a complete run had another number of steps."""
        status = self.read_status()
        if status.get("state") != "complete":
            return False
        if status["max_steps"] != max_steps:
            raise UserError(
                f"{self.path} is complete with {status['max_steps']:,} steps and {max_steps:,} are asked for: "
                "name another --output_dir"
            )
        return True

    def read_status(self) -> dict[str, Any]:
        """The last written status, {} before the first."""
        path = self.path / STATUS
        return json.loads(path.read_text()) if path.is_file() else {}

    def write_status(self, state: str, **values: Any) -> None:
        """Record the state: running, complete, stopped or failed. Values of earlier calls stay."""
        status = self.read_status() | values | {"state": state, "updated": now()}
        self.write_json(STATUS, status)

    def write_json(self, name: str, document: dict[str, Any]) -> None:
        """Write a JSON document whole or not at all."""
        self.write_text(name, json.dumps(document, indent=2) + "\n")

    def write_text(self, name: str, text: str) -> None:
        """Write a file whole or not at all."""
        write_whole(self.path / name, text)

    def append(self, name: str, event: dict[str, Any]) -> None:
        """Add one event to a .jsonl file."""
        with (self.path / name).open("a", encoding="utf-8") as file:
            file.write(json.dumps(event, ensure_ascii=False) + "\n")


def now() -> str:
    """The time in ISO form, UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def describe_environment() -> dict[str, Any]:
    """Versions, the commit and the command: what it takes to say where a number comes from."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    root = Path(__file__).parents[2]
    git = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() or None
    except OSError:
        commit = None
    return {"versions": versions, "commit": commit, "command": " ".join(sys.argv), "started": now()}

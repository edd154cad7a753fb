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
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = (self.path / ".lock").open("a+")
        except OSError as error:
            raise UserError(f"cannot write into {self.path} ({error.strerror}): name another --output_dir") from None
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

    def is_finished(self) -> bool:
        """Whether the run is complete and its final/ is there."""
        return self.read_status().get("state") == "complete" and (self.path / "final" / "config.json").is_file()

    def check_trajectory(self, trajectory: dict[str, Any]) -> None:
        """Raise UserError where this directory belongs to another run than the one that is asked for."""
        path = self.path / "environment.json"
        if path.is_file():
            refuse_another_run(json.loads(path.read_text()).get("trajectory", {}), trajectory, where=self.path)

    def rewind(self, step: int) -> None:
        """Drop the events after `step`: the run will write them again."""
        for name in ("metrics.jsonl", "samples.jsonl"):
            path = self.path / name
            if path.is_file():
                lines = path.read_text(encoding="utf-8").split("\n")
                write_whole(path, "".join(f"{line}\n" for line in lines if _is_event_until(line, step)))

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


def _is_event_until(line: str, step: int) -> bool:
    try:
        return json.loads(line)["step"] <= step
    except (ValueError, KeyError):
        return False  # a line that a kill cut short


def refuse_another_run(saved: dict[str, Any], asked: dict[str, Any], *, where: Path) -> None:
    """Raise UserError, with the differences, where what is saved was not asked for."""
    asked = json.loads(json.dumps(asked))
    changed = [
        f"{key} {_shown(saved.get(key))} -> {_shown(asked.get(key))}"
        for key in dict.fromkeys([*saved, *asked])
        if saved.get(key) != asked.get(key)
    ]
    if changed:
        raise UserError(
            f"{where} belongs to another run ({'; '.join(changed)}): undo the change or name another --output_dir"
        )


def _shown(value: Any) -> str:
    return "nothing" if value == "" else str(value)


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

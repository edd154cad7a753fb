"""A run that goes on while a test looks at it, and what there is to compare afterwards."""

import contextlib
import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from tests.commands import start_command


class Started:
    """A command that goes on while the test looks at it."""

    def __init__(self, words: tuple[object, ...], run: Path, log: str, environment: dict[str, str]) -> None:
        self.run = run
        self.output = run.parent / log
        with self.output.open("w") as file:
            self.process = start_command(words, environment, stdout=file, stderr=file)

    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def wait_until(self, condition: Callable[[], Any], timeout: float = 90) -> Any:
        """Look every few milliseconds until something is so: a file, a step."""
        deadline = time.monotonic() + timeout
        while not (value := condition()):
            assert time.monotonic() < deadline, self.text()[-3000:]
            assert self.process.poll() is None, f"ended before: {self.text()[-3000:]}"
            time.sleep(0.01)
        return value

    def step(self) -> int:
        path = self.run / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.is_file() else []
        return json.loads(lines[-1])["step"] if lines and lines[-1].endswith("}") else -1

    def ranks(self) -> dict[int, psutil.Process]:
        """The processes that train, by their rank."""
        found = {}
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                rank = process.environ().get("RANK")
                if rank is not None and process.ppid() == self.process.pid:
                    found[int(rank)] = process
        return found

    def end(self, timeout: float = 120) -> int:
        """Wait for the end; returns the exit code."""
        return self.process.wait(timeout)


def weights(run: Path) -> str:
    """A hash of the final weights."""
    return hashlib.sha256((run / "final" / "model.safetensors").read_bytes()).hexdigest()


def losses(run: Path) -> list[tuple[int, str, float]]:
    """Every loss that a run has logged, with its step and kind."""
    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(e["step"], key, e[key]) for e in events for key in ("loss", "eval_loss") if key in e]


def status(run: Path) -> dict[str, Any]:
    return json.loads((run / "run_status.json").read_text())

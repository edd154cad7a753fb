"""Start runs in the background, and compare finished runs."""

import hashlib
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from tests.commands import start_cold
from tests.warm import start_warm


class Started:
    """A command that runs in the background of a test.

    If `warm` is true, the command is forked from a process that has already imported the libraries.
    """

    def __init__(
        self, words: tuple[object, ...], run: Path, log: str, env: dict[str, str], *, warm: bool, mark: Path
    ) -> None:
        self.run, self.mark = run, mark
        self.output = run.parent / log
        self.process: Any = (start_warm if warm else start_cold)(words, env, self.output)

    def text(self) -> str:
        return self.output.read_text(errors="replace", encoding="utf-8")

    def wait_until(self, condition: Callable[[], Any], timeout: float = 90) -> Any:
        """Call `condition` every 10 ms until it returns a true value; return this value.

        Raises AssertionError if the command ends first, or after `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while not (value := condition()):
            assert time.monotonic() < deadline, self.text()[-3000:]
            assert self.process.poll() is None, f"The command ended too early: {self.text()[-3000:]}"
            time.sleep(0.01)
        return value

    def step(self) -> int:
        path = self.run / "metrics.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        return json.loads(lines[-1])["step"] if lines and lines[-1].endswith("}") else -1

    def ranks(self) -> dict[int, psutil.Process]:
        """Return the training process of each rank."""
        # A launcher starts the processes in the order of their ranks.
        workers = psutil.Process(self.process.pid).children()
        return dict(enumerate(sorted(workers, key=lambda worker: (worker.create_time(), worker.pid))))

    def end(self, timeout: float = 120) -> int:
        """Wait up to `timeout` seconds for the end of the command; return the exit code."""
        return self.process.wait(timeout)


def weights(run: Path) -> str:
    """Return the SHA-256 of the final model's weights file."""
    return hashlib.sha256((run / "final" / "model.safetensors").read_bytes()).hexdigest()


def losses(run: Path) -> list[tuple[int, str, float]]:
    """Return (step, kind, loss) of all logged losses; kind is "loss" or "eval_loss"."""
    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [(e["step"], key, e[key]) for e in events for key in ("loss", "eval_loss") if key in e]


def results(run: Path) -> tuple[str, list[tuple[int, str, float]]]:
    """Return all that a fault must not change: the final weights and the logged losses."""
    return weights(run), losses(run)


def status(run: Path) -> dict[str, Any]:
    return json.loads((run / "run_status.json").read_text(encoding="utf-8"))


def fill(disk: Path, leave: int) -> Path:
    """Fill a disk with a file until `leave` bytes are free. Return the file's path."""
    filler = disk / "filler"
    filler.unlink(missing_ok=True)
    filler.write_bytes(b"x" * max(0, shutil.disk_usage(disk).free - leave))
    return filler

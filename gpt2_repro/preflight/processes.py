"""Run commands that end with this process, in every case."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import psutil


def run_to_end(
    command: Sequence[str],
    *,
    too_long: Callable[[str, float], bool],
    environment: Mapping[str, str] | None = None,
) -> tuple[int | None, str]:
    """Run a command and return its exit code, None if it took too long, and its output.

    Every process that it has started is killed at the end, also if this process is interrupted.

    Args:
        too_long: whether to give up, from the output so far and the seconds since the start.
        environment: additional variables.
    """
    with tempfile.TemporaryDirectory(prefix="preflight-") as scratch, _signals_raise():
        log = Path(scratch, "log")
        variables = {**os.environ, **(environment or {}), "TMPDIR": scratch}
        # In a session of its own: Ctrl-C reaches this process only, which then ends the others.
        options: dict[str, Any] = {"env": variables, "stderr": subprocess.STDOUT, "start_new_session": True}
        with log.open("wb") as output, subprocess.Popen(command, stdout=output, **options) as process:
            began = time.monotonic()
            try:
                while process.poll() is None and not too_long(_read(log), time.monotonic() - began):
                    time.sleep(0.1)
                code = process.poll()
            finally:
                _end(process)
        return code, _read(log)


def last_words(said: str) -> str:
    """Return the line with the error. A launcher writes its own traceback after it."""
    lines = [line.strip() for line in said.splitlines() if re.search(r"\w", line)]
    telling = [line for line in lines if re.match(r"(\[rank\d+\]: *)?(error: |[\w.]*(Error|Exception)\b)", line)]
    return (telling or lines[-1:] or ["no output"])[0]


def _read(log: Path) -> str:
    return log.read_text(errors="replace")


def _end(process: subprocess.Popen[bytes]) -> None:
    # The workers of a launcher have their own sessions.
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
    process.kill()
    process.wait()


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    """Raise SystemExit on SIGTERM and SIGHUP, so that everything is cleaned up."""

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

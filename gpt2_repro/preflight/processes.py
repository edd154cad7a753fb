"""Run commands that never outlive this process."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil


def run_to_end(command: Sequence[str], *, seconds: float, **variables: str) -> tuple[int | None, str]:
    """Run a command and return its exit code, None if it took longer than `seconds`, and its output.

    Every process that it has started is killed at the end, also if this process is interrupted.

    Args:
        variables: additions to the environment.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        # By an exception, so that everything is cleaned up.
        signal.signal(number, lambda received, _: sys.exit(128 + received))
    with tempfile.TemporaryDirectory(prefix="preflight-") as scratch:
        log = Path(scratch, "log")
        environment = {**os.environ, **variables, "TMPDIR": scratch}
        # In a session of its own: Ctrl-C reaches this process only, which then ends the others.
        options: dict[str, Any] = {"env": environment, "stderr": subprocess.STDOUT, "start_new_session": True}
        with log.open("wb") as output, subprocess.Popen(command, stdout=output, **options) as process:
            try:
                code = process.wait(seconds)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                _end(process)
        return code, log.read_text(errors="replace")


def last_words(said: str) -> str:
    """Return the line with the error. A launcher writes its own traceback after it."""
    lines = [line.strip() for line in said.splitlines() if re.search(r"\w", line)]
    telling = [line for line in lines if re.match(r"(\[rank\d+\]: *)?(error: |[\w.]*(Error|Exception)\b)", line)]
    return (telling or lines[-1:] or ["no output"])[0]


def _end(process: subprocess.Popen[bytes]) -> None:
    # The workers of a launcher have their own sessions.
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
    process.kill()
    process.wait()

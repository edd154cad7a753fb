"""Run commands, and end all their processes even if this process is interrupted."""

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
    """Run a command and return its exit code and output.

    The exit code is None if the command took longer than `seconds`.

    All processes that the command started are killed at the end.

    Args:
        variables: additional environment variables.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        # End this process by an exception (SystemExit), so that the `finally` blocks run.
        signal.signal(number, lambda received, _: sys.exit(128 + received))
    with tempfile.TemporaryDirectory(prefix="preflight-") as scratch:
        log = Path(scratch, "log")
        environment = {**os.environ, **variables, "TMPDIR": scratch}
        # A new session: Ctrl-C reaches only this process, which then ends the command.
        options: dict[str, Any] = {"env": environment, "stderr": subprocess.STDOUT, "start_new_session": True}
        with log.open("wb") as output, subprocess.Popen(command, stdout=output, **options) as process:
            try:
                code = process.wait(seconds)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                _end(process)
        return code, log.read_text(encoding="utf-8", errors="replace")


def last_words(said: str) -> str:
    """Return the first error message in a command's output.

    An error message is a line that starts with `error: ` or with the name of an exception. Without an error message,
    the last line is returned.
    """
    lines = [line.strip() for line in said.splitlines() if re.search(r"\w", line)]
    # Often not the last line, because a launcher prints a traceback after the error.
    errors = [line for line in lines if re.match(r"(\[rank\d+\]: *)?(error: |[\w.]*(Error|Exception)\b)", line)]
    return (errors or lines[-1:] or ["no output"])[0]


def _end(process: subprocess.Popen[bytes]) -> None:
    # Kill each child: the workers of a launcher run in separate sessions.
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
    process.kill()
    process.wait()

"""Commands that a preflight starts: their end is certain, whatever happens to it or to them."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

import psutil


def run_to_end(
    command: Sequence[str],
    *,
    too_long: Callable[[str, float], bool],
    environment: Mapping[str, str] | None = None,
) -> tuple[int | None, str]:
    """Run a command to its end; the exit code, None where it took too long, and everything that it said.

    Every process that it has started ends with it, also where this one is interrupted or told to end.

    Args:
        too_long: whether to give up, from what was said so far and the seconds since the start.
        environment: variables beside those that are there.
    """
    with tempfile.TemporaryDirectory(prefix="preflight-") as scratch, _signals_raise():
        log = Path(scratch, "log")
        variables = {**os.environ, **(environment or {}), "TMPDIR": scratch}
        with (
            log.open("wb") as output,
            # A session of its own: Ctrl-C reaches this process alone, which ends the others in their order.
            subprocess.Popen(
                command, env=variables, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            ) as process,
        ):
            began = time.monotonic()
            try:
                while process.poll() is None and not too_long(_read(log), time.monotonic() - began):
                    time.sleep(0.1)
                code = process.poll()
            finally:
                _end(process)
        return code, _read(log)


def last_words(said: str) -> str:
    """The line that says what was wrong. A launcher writes a traceback of its own behind it."""
    lines = [line.strip() for line in said.splitlines() if re.search(r"\w", line)]
    telling = [line for line in lines if re.match(r"(\[rank\d+\]: *)?(error: |[\w.]*(Error|Exception)\b)", line)]
    return (telling or lines[-1:] or ["it said nothing"])[0]


def _read(log: Path) -> str:
    return log.read_text(errors="replace")


def _end(process: subprocess.Popen[bytes]) -> None:
    # A launcher's workers have sessions of their own.
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
    process.kill()
    process.wait()


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    """What ends a process without a word raises SystemExit here, so that everything is put away."""

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

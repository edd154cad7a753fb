"""Run a process next to the trainer that performs jobs, and read its replies.

The trainer writes each job as a line of JSON to the stdin of the process. The process prints one line of JSON per job.
"""

import contextlib
import ctypes
import json
import logging
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


SIGN_SECONDS = 5.0  # between two signs of progress
PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


class SideProcess:
    """A process that performs jobs while training continues.

    Args:
        code: Python code that calls `serve`.
        descriptors: open files that the process inherits.
    """

    def __init__(self, code: str, *arguments: object, descriptors: Sequence[int] = ()) -> None:
        # A separate session, because a signal to the launcher or to the terminal must not end the process.
        self.process = subprocess.Popen(
            [sys.executable, "-c", f"import gpt2_repro.path_order; {code}", *map(str, arguments)],
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,  # select does not see a reply in a buffer
            start_new_session=True,
            pass_fds=descriptors,
        )

    def submit(self, job: dict[str, Any]) -> None:
        """Send a job to the process."""
        self._write(json.dumps(job).encode() + b"\n")

    def reply(self, seconds: float | None) -> dict[str, Any] | None:
        """Return the next reply, {} for a sign of progress, or None after `seconds` without either (None: wait)."""
        stdout: Any = self.process.stdout
        if not select.select([stdout], [], [], seconds)[0]:
            return None
        return json.loads(stdout.readline() or '{"error": "the process was killed"}')

    def end(self) -> None:
        """Tell the process to exit after its last job."""
        self._write(b"\n")  # dataloader workers may have the pipe open

    def _write(self, line: bytes) -> None:
        stdin: Any = self.process.stdin
        with contextlib.suppress(BrokenPipeError):  # the reply of a killed process is missing
            stdin.write(line)


def serve(perform: Callable[[dict[str, Any], Callable[[], None]], dict[str, Any]]) -> None:
    """Read one job per line of stdin, perform it, and print its reply.

    Stop at an empty line or at the end of stdin. An exception becomes a reply with `error` and `errno`. While a job
    calls its second argument, print an empty object now and then.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # a machine that shuts down, or Slurm, sends them to all processes
    logging.basicConfig(format="%(message)s", stream=sys.stderr)  # stdout has the replies
    signed_at = time.monotonic()

    def show_progress() -> None:
        nonlocal signed_at
        if time.monotonic() - signed_at > SIGN_SECONDS:
            signed_at = time.monotonic()
            _print({})

    while True:
        line = sys.stdin.readline().strip()
        if not line:
            return
        try:
            reply = perform(json.loads(line), show_progress)  # if the trainer was killed, the line may be cut
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}", "errno": getattr(error, "errno", None)}
        _print(reply)


def end_with_parent(number: int = signal.SIGKILL) -> None:
    """On Linux, make this process receive the signal `number` when its parent ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def _print(reply: dict[str, Any]) -> None:
    with contextlib.suppress(BrokenPipeError):  # the trainer has ended
        os.write(sys.stdout.fileno(), json.dumps(reply).encode() + b"\n")

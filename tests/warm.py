"""Runs as `start_command` starts them, launcher and all, but forked from a process that has imported the stack.

Importing takes seconds, a tiny run takes one. What a command imports, and from where, is for the tests that start it cold.
"""

import importlib
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any
from unittest import mock

from tests.commands import ENVIRONMENT, ROOT, words_of


def start_warm(
    words: tuple[object, ...], environment: dict[str, str], output: Path, errors: Path | None = None
) -> "Forked":
    """As start_command; stdout goes to the file `output`, and stderr too where there is no other for it."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["tests.stack"])
    with mock.patch.dict(os.environ, ENVIRONMENT):  # the server keeps it: torch counts its threads when it is imported
        return Forked(server, _begin, words_of(words), os.environ | environment, output, errors)


class Forked:
    """A process of multiprocessing with the methods of subprocess.Popen that a launcher and a test call."""

    def __init__(self, context: BaseContext, *target_and_args: Any) -> None:
        target, *args = target_and_args
        self.process = context.Process(target=target, args=args)  # type: ignore[attr-defined]
        self.process.start()
        self.pid = self.process.pid

    def poll(self) -> int | None:
        self.process.join(0)
        return self.process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired(str(self.process), timeout or 0)
        return self.process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _begin(words: list[str], environment: dict[str, str], output: Path, errors: Path | None) -> None:
    assert "tests.stack" in sys.modules, "the server has not imported the stack: run pytest in the project's root"
    for stream, path in ((1, output), (2, errors)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) if path else 1, stream)
    if words[0] != "-m":
        return _run_script(words, environment)

    from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

    fork = multiprocessing.get_context("fork")
    SubprocessHandler._popen = lambda self, args, env: Forked(fork, _run_script, args[2:], env)  # of python -u …
    _become(words[1:], environment)
    return importlib.import_module(words[1]).main()


def _run_script(words: list[str], environment: dict[str, str]) -> None:
    _become(words, environment)
    runpy.run_path(str(ROOT / words[0]), run_name="__main__")


def _become(words: list[str], environment: dict[str, str]) -> None:
    os.setsid()
    os.chdir(ROOT)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = list(words)

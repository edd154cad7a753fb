"""Start commands quickly by forking a process that has imported the libraries.

Tests that check the imports of a command must use tests.commands.start_command instead.
"""

import importlib
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import time
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any
from unittest import mock

import gpt2_repro
from tests.commands import ENVIRONMENT, ROOT, words_of


def start_warm(
    words: tuple[object, ...], environment: dict[str, str], output: Path, errors: Path | None = None
) -> "Forked":
    """Start a command in a forked process, and write stdout and stderr to files.

    `words` and `environment` are those of tests.commands.start_command. If `errors` is None, stderr goes to `output`.
    """
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["tests.stack"])
    with mock.patch.dict(os.environ, ENVIRONMENT):  # torch reads the number of threads when the server imports it
        return Forked(server, _begin, words_of(words), os.environ | environment, output, errors)


class Forked:
    """Wrap a multiprocessing process so that it can be used like a subprocess.Popen."""

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
    assert "tests.stack" in sys.modules, "The server has not imported the stack. Run pytest in the root folder."
    for stream, path in ((1, output), (2, errors)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) if path else 1, stream)
    if words[0] != "-m":
        return _run_script(words, environment)

    from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

    fork = multiprocessing.get_context("fork")
    SubprocessHandler._popen = lambda self, args, env: Forked(fork, _run_script, args[2:], env)  # without python -u
    _become(words[1:], environment)
    return importlib.import_module(words[1]).main()


def _run_script(words: list[str], environment: dict[str, str]) -> None:
    _become(words, environment)
    runpy.run_path(str(ROOT / words[0]), run_name="__main__")


def _become(words: list[str], environment: dict[str, str]) -> None:
    gpt2_repro.STARTED = time.monotonic()
    os.setsid()
    os.chdir(ROOT)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = list(words)

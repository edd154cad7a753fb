"""Commands that a preflight starts leave nothing behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from gpt2_repro.preflight.processes import last_words, run_to_end


# A launcher with a worker in a session of its own; both would run for ten minutes.
LAUNCHER = """
import pathlib, subprocess, sys, time
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
pathlib.Path(sys.argv[1]).write_text(str(worker.pid))
print("started", flush=True)
time.sleep(600)
"""
CALLER = """
import sys
from gpt2_repro.preflight.processes import run_to_end
run_to_end([sys.executable, "-c", sys.argv[1], sys.argv[2]], too_long=lambda said, elapsed: False)
"""


def wait_for(condition, seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def has_ended(pid: int) -> bool:
    """Whether a process has ended. An orphan stays as a zombie if an earlier test made pytest adopt orphans."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_output_and_exit_code() -> None:
    words = "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"
    assert run_to_end([sys.executable, "-uc", words], too_long=lambda said, elapsed: False) == (3, "out\nerr\n")


def test_one_that_takes_too_long_is_ended_with_its_workers(tmp_path: Path) -> None:
    note = tmp_path / "worker"
    code, said = run_to_end(
        [sys.executable, "-c", LAUNCHER, str(note)], too_long=lambda said, elapsed: "started" in said
    )
    assert code is None and said == "started\n"
    assert wait_for(lambda: has_ended(int(note.read_text())))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_whoever_is_told_to_end_ends_everything(number: signal.Signals, tmp_path: Path) -> None:
    note, temporary = tmp_path / "worker", tmp_path / "tmp"
    temporary.mkdir()
    environment = os.environ | {"TMPDIR": str(temporary)}
    words = [sys.executable, "-c", CALLER, LAUNCHER, str(note)]
    with subprocess.Popen(words, env=environment, stderr=subprocess.DEVNULL, start_new_session=True) as process:
        assert wait_for(lambda: note.exists() and note.read_text() != "")
        process.send_signal(number)
        assert process.wait(20) != 0
    assert wait_for(lambda: has_ended(int(note.read_text())))
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("Traceback\nValueError: no such data\n=====\nRoot Cause:\n", "ValueError: no such data"),
        ("[rank1]: torch.OutOfMemoryError: CUDA\n", "[rank1]: torch.OutOfMemoryError: CUDA"),
        ("error: no such recipe\ntraceback : To enable traceback see\n", "error: no such recipe"),
        ("step 1\nstep 2\n----\n", "step 2"),
        ("", "no output"),
    ],
)
def test_what_was_wrong_is_found_in_what_was_said(said: str, words: str) -> None:
    assert last_words(said) == words

"""Commands that a preflight starts leave nothing behind, and the search for the micro-batch that uses them."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from gpt2_repro.preflight.memory import Outcome, Rung, attempt_command, best, find_largest
from gpt2_repro.preflight.processes import last_words


# A launcher with a worker in a session of its own; both would run for ten minutes.
LAUNCHER = """
import pathlib, subprocess, sys, time
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
pathlib.Path(sys.argv[1]).write_text(str(worker.pid))
time.sleep(600)
"""
# Without a signal the time is over as soon as the worker runs.
CALLER = """
import os, subprocess, sys, time
from gpt2_repro.preflight.processes import run_to_end
wait = subprocess.Popen.wait
def out_of_time(self, timeout=None):
    while timeout and not (os.path.exists(sys.argv[2]) and open(sys.argv[2]).read()):
        time.sleep(0.05)
    if timeout:
        raise subprocess.TimeoutExpired(self.args, timeout)
    return wait(self)
if sys.argv[3] == "0":
    subprocess.Popen.wait = out_of_time
code, _ = run_to_end([sys.executable, "-c", *sys.argv[1:3]], seconds=600)
assert code is None
"""


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    """Restore the handlers that run_to_end sets."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def wait_for(condition) -> bool:
    deadline = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def has_ended(pid: int) -> bool:
    """Whether a process has ended. An orphan stays as a zombie if an earlier test made pytest adopt orphans."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize("number", [None, signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_command_ends_with_its_workers(number: signal.Signals | None, tmp_path: Path) -> None:
    """After a signal, or, if it is None, after its time."""
    note, temporary = tmp_path / "worker", tmp_path / "tmp"
    temporary.mkdir()
    words = [sys.executable, "-c", CALLER, LAUNCHER, str(note), str(number or 0)]
    with subprocess.Popen(words, env=os.environ | {"TMPDIR": str(temporary)}, start_new_session=True) as process:
        assert wait_for(lambda: note.exists() and note.read_text() != "")
        if number:
            process.send_signal(number)
        assert (process.wait(60) == 0) is (number is None)
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
def test_the_error_is_found_in_the_output(said: str, words: str) -> None:
    assert last_words(said) == words


@pytest.mark.parametrize(
    ("code", "result", "said"),
    [
        ("print('out')", "fits", ""),
        ("import os; os.kill(os.getpid(), 9)", "out of memory", ""),
        ("raise RuntimeError('CUDA out of memory. Tried to allocate 20.00 GiB')", "out of memory", ""),
        ("raise SystemExit('CUBLAS_STATUS_ALLOC_FAILED')", "out of memory", ""),
        ("raise ValueError('no such data')", "failed", "no such data"),
        ("import time; time.sleep(600)", "failed", "2 s"),
    ],
)
def test_a_command_that_runs_out_of_memory_is_told_from_one_that_fails(code: str, result: str, said: str) -> None:
    seconds = 2 if "sleep" in code else 60
    outcome = attempt_command([sys.executable, "-c", code], Rung(1), seconds=seconds)
    assert outcome.result == result and said in outcome.said


# Attempts in order, then the best. C: with activation checkpointing.
@pytest.mark.parametrize(
    ("start", "most", "rows", "plain", "checkpointed", "attempts"),
    [
        (16, 64, 512, 64, 64, "16 32 64 64"),
        (16, 64, 512, 32, 64, "16 32 64 32"),
        # With checkpointing it is slower: half of it without is tried again, and wins.
        (16, 64, 512, 4, 64, "16 16C 8 4 4"),
        (4, 64, 512, 0, 2, "4 4C 2 2C 1 2C"),
        (2, 64, 512, 0, 0, "2 2C 1 1C"),
        # Only divisors of the rows of a step: 480 are nanoGPT's, and 48 does not divide 512.
        (12, 12, 480, 4, 6, "12 12C 6 6C 3 3"),
        (48, 48, 512, 64, 64, "32 32"),
        (16, 100, 512, 64, 64, "16 32 64 64"),
        (1, 10, 30, 10, 10, "1 2 5 10 10"),
    ],
)
def test_the_ladder_of_settings(
    start: int, most: int, rows: int, plain: int, checkpointed: int, attempts: str
) -> None:
    def attempt(rung: Rung) -> Outcome:
        room = checkpointed if rung.checkpointing else plain
        return Outcome(rung, "fits" if rung.micro_batch <= room else "out of memory")

    outcomes = find_largest(start, most, rows, attempt)
    rungs = [outcome.rung for outcome in outcomes] + [rung for rung in [best(outcomes)] if rung]
    assert " ".join(f"{rung.micro_batch}{'C' if rung.checkpointing else ''}" for rung in rungs) == attempts


def test_another_failure_ends_the_search() -> None:
    outcomes = find_largest(8, 64, 512, lambda rung: Outcome(rung, "failed", "no such data"))
    assert [outcome.rung for outcome in outcomes] == [Rung(8)] and best(outcomes) is None
    assert Rung(8, True).options == ["--per_device_train_batch_size", "8", "--activation_checkpointing"]

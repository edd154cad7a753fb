"""Preflight finds the largest micro-batch that fits in memory.

If a signal ends preflight, all processes that preflight has started end too.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from gpt2_repro.preflight.memory import MemoryTrial, Outcome, attempt_command, best, find_largest
from tests.runpod.conftest import wait_for


# A launcher that starts a worker in a separate session. Both run for ten minutes unless they are killed.
LAUNCHER = """
import pathlib, subprocess, sys, time
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
pathlib.Path(sys.argv[1]).write_text(str(worker.pid))
time.sleep(600)
"""
CALLER = """
import sys
from gpt2_repro.preflight.processes import run_to_end
run_to_end([sys.executable, "-c", *sys.argv[1:]], seconds=600)
"""


def has_ended(pid: int) -> bool:
    """Return whether a process has ended or is a zombie."""
    try:
        # Orphaned processes that pytest has adopted become zombies when they end.
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_command_ends_with_its_workers(number: signal.Signals, tmp_path: Path) -> None:
    note, temporary = tmp_path / "worker", tmp_path / "tmp"
    temporary.mkdir()
    words = [sys.executable, "-c", CALLER, LAUNCHER, str(note)]
    with subprocess.Popen(words, env=os.environ | {"TMPDIR": str(temporary)}, start_new_session=True) as process:
        wait_for(lambda: note.exists() and note.read_text(encoding="utf-8"))
        process.send_signal(number)
        assert process.wait(60) != 0
    wait_for(lambda: has_ended(int(note.read_text(encoding="utf-8"))))
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize(
    ("code", "result", "said"),
    [
        ("import os; os.kill(os.getpid(), 9)", "out of memory", ""),
        ("raise SystemExit('CUBLAS_STATUS_ALLOC_FAILED')", "out of memory", ""),
        ("raise ValueError('no such data')", "failed", "no such data"),
        ("import time; time.sleep(600)", "failed", "2 s"),
    ],
)
def test_out_of_memory_is_told_from_a_failure(code: str, result: str, said: str, monkeypatch) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # pytest's signal handlers must stay
    seconds = 2 if "sleep" in code else 60
    outcome = attempt_command([sys.executable, "-c", code], MemoryTrial(1), seconds=seconds)
    assert outcome.result == result and said in outcome.said


# `attempts`: micro-batches in the order in which they are tried, then the best one. C: activation checkpointing.
@pytest.mark.parametrize(
    ("start", "most", "rows", "plain", "checkpointed", "attempts"),
    [
        (16, 64, 512, 64, 64, "16 32 64 64"),
        (16, 64, 512, 32, 64, "16 32 64 32"),
        # Activation checkpointing is slower, so it is tried last.
        (16, 64, 512, 4, 64, "16 8 4 4"),
        (4, 64, 512, 0, 2, "4 2 1 4C 2C 2C"),
        (2, 64, 512, 0, 0, "2 1 2C 1C"),
        # Only divisors of the rows per step are tried. nanoGPT has 480 rows. 48 does not divide 512.
        (12, 12, 480, 4, 6, "12 6 3 3"),
        (48, 48, 512, 64, 64, "32 32"),
        (1, 10, 30, 10, 10, "1 2 5 10 10"),
    ],
)
def test_the_ladder_of_settings(start, most, rows, plain, checkpointed, attempts) -> None:
    def attempt(trial: MemoryTrial) -> Outcome:
        room = checkpointed if trial.checkpointing else plain
        return Outcome(trial, "fits" if trial.micro_batch <= room else "out of memory")

    outcomes = find_largest(start, most, rows, attempt)
    rungs = [outcome.trial for outcome in outcomes] + [trial for trial in [best(outcomes)] if trial]
    assert " ".join(f"{trial.micro_batch}{'C' if trial.checkpointing else ''}" for trial in rungs) == attempts


def test_another_failure_ends_the_search() -> None:
    outcomes = find_largest(8, 64, 512, lambda trial: Outcome(trial, "failed", "no such data"))
    assert [outcome.trial for outcome in outcomes] == [MemoryTrial(8)] and best(outcomes) is None
    assert MemoryTrial(8, True).options == ["--per_device_train_batch_size", "8", "--activation_checkpointing"]

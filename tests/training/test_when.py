"""A run stops at a signal, saves rolling checkpoints, and does not hang silently."""

import ctypes
import multiprocessing
import os
import re
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from transformers import TrainerCallback

from gpt2_repro.recipe import TrainingSection
from gpt2_repro.run_record import RunRecord
from gpt2_repro.run_record.layout import checkpoints
from gpt2_repro.training import when
from gpt2_repro.training.launch_checks import LAUNCHER_DIED
from gpt2_repro.training.when import SIGNALS, StepControl, StopSignals, Watchdog


@pytest.fixture
def signals():
    before = {number: signal.getsignal(number) for number in (*SIGNALS, LAUNCHER_DIED)}
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it, also for the tests
    taken = StopSignals()
    taken.install()
    yield taken
    for number, handler in before.items():
        signal.signal(number, handler)


def test_second_signal_and_signals_of_workers_are_ignored(signals: StopSignals) -> None:
    for number in (signal.SIGINT, signal.SIGINT, signal.SIGTERM):  # signals of the terminal and of the launcher
        os.kill(os.getpid(), number)
    assert signals.received == signal.SIGINT
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the setting of nohup
    signals.install()
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    forked = StopSignals()
    forked._process = 1
    forked._receive(signal.SIGTERM, None)
    assert forked.received == 0


def test_a_rolling_checkpoint_is_replaced_by_the_next_checkpoint(typed, tmp_path) -> None:
    run = tmp_path / "run"
    due = ("--save_rolling_minutes", 1e-6, "--background_save", "false", "--keep_checkpoints", 0)
    # The last checkpoint of a run is never rolling, and neither is one that is due for another reason.
    for options, saves, kept in (
        (("--save_strategy", "no", "--stop_at_step", 2), [2], [2]),
        (("--stop_at_step", 3), [3], [3, 2]),
        (("--stop_at_step", 7), [4, 5, 6, 7], [7, 4, 3, 2]),
        ((), [8], [8, 7, 4, 3, 2]),
    ):
        done = typed(run, *due, *options)
        assert re.findall(r"saved \S+/checkpoint-(\d+):", done.stdout) == list(map(str, saves)), done.stdout
        assert [path.name for path in checkpoints(run)] == [f"checkpoint-{step}" for step in kept]


def test_rolling_checkpoints_do_not_postpone_save_minutes(train, tmp_path) -> None:
    due = ("--save_rolling_minutes", 1e-6, "--save_minutes", 0.005, "--save_steps", 1000, "--keep_checkpoints", 0)
    run = train(tmp_path / "run", *due, "--background_save", "false", "--max_steps", 60, "--eval_strategy", "no")
    assert len(checkpoints(run)) > 2


SIGNS = ("on_train_begin", "on_substep_end", "on_step_end", "on_prediction_step", "on_evaluate", "on_save")


def watched(signs: tuple[str, ...], *, pause: float, until: float) -> Any:
    """Start a process with a watchdog of 1 second. Every `pause` seconds, one of `signs` is given."""

    def work() -> None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        watchdog = Watchdog(1.0)
        watchdog.arm()
        end = time.monotonic() + until
        while time.monotonic() < end:
            for sign in signs:
                time.sleep(pause)
                getattr(watchdog, sign)(None, None, None)
        watchdog.disarm()
        time.sleep(1.2)

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    return process


def exit_code(process: Any) -> int | None:
    process.join(60)
    return process.exitcode


@pytest.mark.parametrize("sign", SIGNS)
def test_every_kind_of_progress_restarts_the_watchdog(sign: str) -> None:
    assert tuple(name for name in vars(Watchdog) if name.startswith("on_")) == SIGNS
    assert sign in dir(TrainerCallback)
    watchdog = Watchdog(600)
    before = watchdog._signs
    getattr(watchdog, sign)(None, None, None)
    assert watchdog._signs == before + 1 and watchdog._thread is not None and watchdog._thread.is_alive()
    watchdog.disarm()
    without_limit = Watchdog(0)
    getattr(without_limit, sign)(None, None, None)
    assert without_limit._thread is None


def test_the_watchdog_ends_a_process_without_progress() -> None:
    busy = watched(SIGNS, pause=0.1, until=2.5)
    stuck = watched(("on_step_end",), pause=60, until=2.5)
    assert exit_code(busy) == 0 and exit_code(stuck) == 1


@pytest.mark.parametrize("disk_hangs", [False, True])
def test_a_hang_is_recorded(disk_hangs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that cannot record its hang ends nevertheless."""
    file = tmp_path / "reason"

    def record(reason: str) -> None:
        file.write_text(reason, encoding="utf-8")
        if disk_hangs:
            time.sleep(60)

    def work() -> None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        monkeypatch.setattr(when, "RECORD_SECONDS", 0.5)
        watchdog = Watchdog(0.5)
        watchdog.record_with(record)
        watchdog.arm()
        time.sleep(50)

    process = multiprocessing.get_context("fork").Process(target=work)
    began = time.monotonic()
    process.start()
    assert exit_code(process) == 1
    assert time.monotonic() - began < 45
    assert "--hang_timeout" in file.read_text(encoding="utf-8")


def test_a_stopped_process_does_not_hang() -> None:
    """The watchdog does not count the time between SIGSTOP and SIGCONT."""
    busy = watched(SIGNS, pause=0.1, until=5)
    stuck = watched(("on_step_end",), pause=60, until=2.5)
    time.sleep(0.3)
    for process in (busy, stuck):
        os.kill(process.pid, signal.SIGSTOP)
    time.sleep(2)
    for process in (busy, stuck):
        os.kill(process.pid, signal.SIGCONT)
    assert exit_code(busy) == 0 and exit_code(stuck) == 1


def test_code_that_holds_the_interpreter_lock_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def work() -> None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        monkeypatch.setattr(when, "BACKSTOP", 1.5)
        Watchdog(0.5).arm()
        time.sleep(0.2)
        ctypes.PyDLL(None).sleep(60)  # in contrast to CDLL, it keeps the lock

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    assert exit_code(process) == 1


@pytest.mark.parametrize("number", [*SIGNALS, LAUNCHER_DIED])
def test_only_a_dead_launcher_makes_a_stopped_run_a_failure(signals: StopSignals, number: int) -> None:
    """Slurm and users also send SIGUSR2."""
    os.kill(os.getpid(), number)
    control = StepControl(TrainingSection(), RunRecord("run"), Mock())
    control.signals = signals
    control._stop(control._request(main=False), SimpleNamespace())
    assert control.orphaned == (number == LAUNCHER_DIED)
    if number != LAUNCHER_DIED:
        assert control.reason == signal.Signals(number).name

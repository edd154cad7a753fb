"""A run stops at a signal, saves rolling checkpoints, and does not hang silently."""

import faulthandler
import os
import re
import signal
from unittest.mock import Mock, call

import pytest
from transformers import TrainerCallback

from gpt2_repro.run_record.layout import checkpoints
from gpt2_repro.training.when import SIGNALS, StopSignals, Watchdog


@pytest.fixture
def signals():
    before = {number: signal.getsignal(number) for number in SIGNALS}
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


def test_progress_restarts_the_watchdog(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kind of progress, such as a step or a save, restarts the watchdog's timer."""
    monkeypatch.setattr(faulthandler, "dump_traceback_later", timer := Mock())
    signs = {name for name in vars(Watchdog) if name.startswith("on_")}
    assert signs >= {"on_substep_end", "on_step_end", "on_prediction_step", "on_save", "on_evaluate"}
    assert signs <= set(dir(TrainerCallback))
    for sign in signs:
        getattr(Watchdog(600), sign)(None, None, None)
        getattr(Watchdog(0), sign)(None, None, None)  # disabled
    assert timer.mock_calls == [call(600, exit=True, file=2)] * len(signs)

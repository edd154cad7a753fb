"""When a run saves and when it stops."""

import os
import signal
import time
from types import SimpleNamespace

import pytest
from transformers import TrainerControl

from gpt2_repro.training.ranks import Ranks
from gpt2_repro.training.when import SIGNALS, Stopping, StopSignals


@pytest.fixture
def signals():
    before = {number: signal.getsignal(number) for number in SIGNALS}
    taken = StopSignals()
    taken.install()
    yield taken
    for number, handler in before.items():
        signal.signal(number, handler)


def stopping_of(signals: StopSignals | None = None, *, seconds: float = 0.0) -> Stopping:
    return Stopping(signals or StopSignals(), Ranks(), clock=lambda: seconds)


ARGS = {"eval_strategy": "steps", "save_strategy": "steps", "stop_at_step": 0}
ARGS |= dict.fromkeys(("max_hours", "max_usd", "usd_per_hour", "save_minutes"), 0.0)


def ask(stopping: Stopping, step: int = 5, rank: int = 0, validates: bool = True, **options: object) -> TrainerControl:
    """What the end of a step decides, after Trainer's own callback."""
    control = TrainerControl(should_evaluate=validates)
    state = SimpleNamespace(global_step=step, max_steps=10, is_world_process_zero=rank == 0)
    stopping.on_step_end(SimpleNamespace(**ARGS | options), state, control)
    return control


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_a_signal_stops_with_a_checkpoint_and_owes_the_validation(signals: StopSignals, number) -> None:
    stopping = stopping_of(signals)
    assert not ask(stopping).should_training_stop
    os.kill(os.getpid(), number)
    control = ask(stopping, rank=1)
    assert control.should_save and control.should_training_stop and not control.should_evaluate
    died = number == signal.SIGUSR2
    assert stopping.reason == ("the launcher died" if died else number.name) and stopping.orphaned is died
    # After the last step there is nothing to stop.
    last = ask(stopping_of(signals), step=10)
    assert last.should_log and last.should_evaluate and not last.should_save


def test_a_second_signal_says_nothing_new_and_a_readers_is_its_parents_business(signals: StopSignals) -> None:
    for number in (signal.SIGINT, signal.SIGINT, signal.SIGTERM):  # the terminal's and the launcher's
        os.kill(os.getpid(), number)
    assert signals.received == signal.SIGINT
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    signals.install()
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    forked = StopSignals()
    forked._process = 1
    forked._receive(signal.SIGTERM, None)
    assert forked.received == 0


@pytest.mark.parametrize(
    ("seconds", "options", "reason"),
    [
        (7200, {"max_hours": 2.0}, "--max_hours 2"),
        (3599, {"max_usd": 14.0, "usd_per_hour": 14.0}, None),
        (3600, {"max_usd": 14.0, "usd_per_hour": 14.0}, "--max_usd 14"),
    ],
)
def test_budgets_stop_with_a_checkpoint(seconds: float, options: dict, reason: str | None) -> None:
    stopping = stopping_of(seconds=seconds)
    assert not ask(stopping, rank=1, **options).should_training_stop  # the clock is rank 0's
    assert ask(stopping, **options).should_training_stop is (reason is not None) and stopping.reason == reason


def test_a_checkpoint_is_due_so_many_minutes_after_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    now, stopping = [1000.0], stopping_of()
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    stopping.on_train_begin(None, None, None)
    for minutes, due in ((14, False), (1, True)):
        now[0] += 60 * minutes
        control = ask(stopping, save_minutes=15.0)
        assert control.should_save is due and not control.should_training_stop and control.should_evaluate
    stopping.on_save(None, None, None)
    assert not ask(stopping, save_minutes=15.0).should_save
    now[0] += 10**6
    assert not ask(stopping, save_minutes=0.0).should_save
    assert not ask(stopping, save_minutes=15.0, save_strategy="no").should_save


def test_stop_at_step_logs_and_validates_its_last_step() -> None:
    stopping = stopping_of()
    assert not ask(stopping, step=4, stop_at_step=5).should_training_stop
    assert not ask(stopping, step=5, stop_at_step=5, validates=False, eval_strategy="no").should_evaluate
    control = ask(stopping, step=5, stop_at_step=5, validates=False)
    assert control.should_save and control.should_training_stop and control.should_log and control.should_evaluate
    assert stopping.reason == "--stop_at_step 5"

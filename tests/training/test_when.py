"""A run saves, validates, samples, scores HellaSwag and stops at the right steps."""

import faulthandler
import itertools
import os
import signal
import time
from types import SimpleNamespace

import pytest
from transformers import TrainerCallback, TrainerControl

from gpt2_repro.training import when
from gpt2_repro.training.when import SIGNALS, StepControl, StopSignals, Watchdog, validates_at_start


@pytest.fixture
def signals():
    before = {number: signal.getsignal(number) for number in SIGNALS}
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it, also for the tests
    taken = StopSignals()
    taken.install()
    yield taken
    for number, handler in before.items():
        signal.signal(number, handler)


ARGS = {"eval_strategy": "steps", "save_strategy": "steps", "logging_strategy": "steps", "stop_at_step": 0}
ARGS |= dict.fromkeys(("max_hours", "max_usd", "usd_per_hour", "save_minutes", "save_rolling_minutes"), 0.0)
ARGS |= {"eval_delay": 0.0, "logging_first_step": False, "eval_steps": 5, "eval_on_start": True, "sample_tokens": 8}


def control_of(signals: StopSignals | None = None, *, seconds: float = 0.0, last: int = 10, **options) -> StepControl:
    args = SimpleNamespace(**ARGS | options)
    args.last_step = min(args.stop_at_step or last, last)
    when = StepControl(args, SimpleNamespace(seconds=lambda: seconds), SimpleNamespace(jobs=[]))
    when.signals = signals or when.signals
    return when


def ask(when: StepControl, step: int = 5, rank: int = 0) -> TrainerControl:
    """Return the decisions of StepControl at the end of a step, for example to save.

    The run has 10 steps and validates every 5 steps.
    """
    state = SimpleNamespace(global_step=step, max_steps=10, logging_steps=100, eval_steps=5, save_steps=100)
    state.is_world_process_zero = rank == 0
    when.on_step_end(when.args, state, control := TrainerControl())
    return control


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


def test_rolling_checkpoint_is_due_when_no_save_is_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    now, when = [1000.0], control_of(save_rolling_minutes=2.0, save_minutes=5.0, stop_at_step=9)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    when.on_train_begin(None, None, None)
    for minutes, saving, saves, rolling in ((1, False, False, False), (1, True, False, False), (0, False, True, True)):
        now[0], when.saver.jobs = now[0] + 60 * minutes, [{}] * saving
        assert ask(when).should_save is saves and when.rolling is rolling
    when.on_save(None, None, None)
    now[0] += 60
    assert not ask(when).should_save
    now[0] += 120  # a rolling checkpoint does not postpone save_minutes
    assert ask(when).should_save and not when.rolling
    when.on_save(None, None, None)
    now[0] += 120
    assert ask(when, step=9).should_save and not when.rolling  # the last checkpoint of a run is never rolling
    assert not ask(control_of(save_rolling_minutes=2.0, save_strategy="no")).should_save


@pytest.mark.parametrize(
    ("every", "eval_steps", "last", "expected"),
    [
        (1000, 250, 3300, [0, 1000, 2000, 3000, 3300]),
        (1000, 300, 3000, [0, 1200, 2100, 3000]),
        (0, 250, 1000, []),
    ],
)
def test_samples_and_hellaswag_are_due_at_the_next_validation(
    every: int, eval_steps: int, last: int, expected: list[int]
) -> None:
    when = control_of(last=last, eval_steps=eval_steps, sample_steps=every, hellaswag_steps=every)
    steps = (*range(0, last, eval_steps), last)
    assert [step for step in steps if when.samples(step)] == expected
    assert [step for step in steps if when.scores_hellaswag(step)] == expected
    when.args.sample_tokens = 0
    assert not any(map(when.samples, steps))


def test_interrupted_validation_is_repeated() -> None:
    args = control_of().args
    for step, is_validated, expected in ((0, False, True), (5, False, True), (5, True, False), (6, False, False)):
        assert validates_at_start(args, step, is_validated=is_validated) is expected


def test_progress_restarts_the_watchdog(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kind of progress, such as a step or a save, restarts the watchdog's timer."""
    calls: list[object] = []
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda seconds, exit: calls.append((seconds, exit)))
    monkeypatch.setattr(faulthandler, "cancel_dump_traceback_later", lambda: calls.append("cancelled"))
    seconds = itertools.count(0, 2)
    monkeypatch.setattr(when.time, "monotonic", lambda: next(seconds))
    signs = {name for name in vars(Watchdog) if name.startswith("on_")}
    assert signs >= {"on_substep_end", "on_step_end", "on_prediction_step", "on_save", "on_evaluate"}
    assert signs <= set(dir(TrainerCallback))
    for watchdog in (Watchdog(600), Watchdog(0)):  # 0 disables the watchdog
        for sign in signs:
            getattr(watchdog, sign)(None, None, None)
        watchdog.disarm()
    assert calls == [(600, True)] * len(signs) + ["cancelled"] * 2

"""When a run saves and when it stops: signals, budgets, the clock and the last step, agreed between all ranks."""

import faulthandler
import logging
import os
import signal
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from transformers import TrainerCallback

from gpt2_repro.training.launcher import LAUNCHER_DIED
from gpt2_repro.training.ranks import Ranks


logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP, LAUNCHER_DIED)
# What ranks tell each other: the largest number counts. A signal is its own number above the others.
NOTHING, SAVE, MAX_HOURS, MAX_USD, SIGNAL = 0, 1, 2, 3, 100


class StopSignals:
    """Remembers a signal instead of dying of it.

    A launcher passes its own on, and a terminal or a `kill` of the process group sends another one at the same moment:
    so a second signal says nothing new, but for Ctrl-C, of which the second one, a second or more after the first, ends
    the process at once.
    """

    def __init__(self) -> None:
        self.received = 0
        self._since = 0.0
        self._process = os.getpid()

    def install(self) -> None:
        """Take the signals over; one that is ignored, as SIGHUP under nohup, stays so. In the main thread only."""
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            return  # a forked process that reads rows: its parent decides
        if not self.received:
            self.received, self._since = number, time.monotonic()
        elif number == signal.SIGINT and time.monotonic() - self._since > 1:
            os._exit(128 + signal.SIGINT)


class Stopping(TrainerCallback):
    """Decides at the end of each step, on all ranks alike, whether a checkpoint is due and whether the run stops.

    Args:
        signals: of this process.
        ranks: which agree on it.
        clock: seconds that the run has cost so far, in all its attempts; asked on rank 0.
    """

    def __init__(self, signals: StopSignals, ranks: Ranks, clock: Callable[[], float]) -> None:
        self.signals, self.ranks, self.clock = signals, ranks, clock
        self.reason: str | None = None
        self.orphaned = False
        self._saved_at: float | None = None

    @property
    def stops(self) -> bool:
        """Whether the run has been told to stop before its last step."""
        return self.reason is not None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._saved_at = time.monotonic()

    on_save = on_train_begin

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step >= state.max_steps:
            control.should_log = True
            return
        wish = self.ranks.largest(self._wish(args, state))
        if wish >= SAVE:
            control.should_save = True
        if wish > SAVE:
            self.stop(wish, args, control)
            control.should_evaluate = False  # owed, and made up for when the run goes on
        elif args.stop_at_step and state.global_step >= args.stop_at_step:
            self.reason = f"--stop_at_step {args.stop_at_step}"
            control.should_save = control.should_training_stop = control.should_log = True
            control.should_evaluate = args.eval_strategy != "no"

    def stop(self, wish: int, args: Any, control: Any) -> None:
        """Stop with a checkpoint, for what the ranks have agreed on."""
        reasons = {MAX_HOURS: f"--max_hours {args.max_hours:g}", MAX_USD: f"--max_usd {args.max_usd:g}"}
        self.orphaned = wish == SIGNAL + LAUNCHER_DIED
        self.reason = "the launcher died" if self.orphaned else reasons.get(wish) or signal.Signals(wish - SIGNAL).name
        control.should_save = control.should_training_stop = True
        logger.info("stopping with a checkpoint: %s", self.reason)

    def cost(self, args: Any) -> dict[str, float]:
        """What the run has cost so far, in dollars, where the price of the machine is known; on rank 0."""
        known = args.usd_per_hour and args.process_index == 0
        return {"usd": round(self.clock() / 3600 * args.usd_per_hour, 2)} if known else {}

    def interruption(self) -> int:
        """What this rank has to say of signals."""
        return SIGNAL + self.signals.received if self.signals.received else NOTHING

    def _wish(self, args: Any, state: Any) -> int:
        if self.signals.received or not state.is_world_process_zero:
            return self.interruption()
        hours = self.clock() / 3600
        if args.max_hours and hours >= args.max_hours:
            return MAX_HOURS
        if args.max_usd and hours * args.usd_per_hour >= args.max_usd:
            return MAX_USD
        due = args.save_strategy != "no" and args.save_minutes
        if due and time.monotonic() - (self._saved_at or 0.0) >= 60 * args.save_minutes:
            return SAVE
        return NOTHING


class Watchdog(TrainerCallback):
    """Ends this process, with the stacks of all its threads on stderr, when `seconds` go by without a sign of life.

    A sign is a pass, a step, a validation batch, a validation, a checkpoint. The clock runs in a thread of C, which a
    process that is stuck in a collective, a disk or the interpreter's lock cannot hold up; every rank has its own.

    Args:
        seconds: more than anything that is no hang takes: compiling, saving. 0: never.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def arm(self, *args: Any, **kwargs: Any) -> None:
        """A sign of life."""
        if self.seconds:
            faulthandler.dump_traceback_later(self.seconds, exit=True)

    on_train_begin = on_substep_end = on_step_end = on_prediction_step = on_evaluate = on_save = arm

    def disarm(self) -> None:
        """The end of a run may take its time."""
        faulthandler.cancel_dump_traceback_later()

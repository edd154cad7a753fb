"""Decide when a run logs, saves, validates, samples, scores HellaSwag and stops."""

import datetime
import enum
import faulthandler
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from transformers import DefaultFlowCallback, TrainerCallback

from gpt2_repro import ranks
from gpt2_repro.checkpoints.saving import CheckpointSaver
from gpt2_repro.console import console
from gpt2_repro.errors import RunFailed
from gpt2_repro.recipe import TrainingSection
from gpt2_repro.run_record import RunRecord
from gpt2_repro.training.launch_checks import LAUNCHER_DIED


logger = logging.getLogger(__name__)

BACKSTOP = 3  # see Watchdog
RECORD_SECONDS = 60.0  # longest time to record a hang, because the disk can be what hangs
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


class Interrupted(Exception):
    """A signal interrupts a validation, on all ranks."""


class StopSignals:
    """Signal handlers that record the first signal instead of ending the process.

    A Ctrl-C more than one second after the first signal ends the process at once.
    """

    def __init__(self) -> None:
        self.received = 0
        self._since = 0.0
        self._process = os.getpid()

    def install(self) -> None:
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
                signal.signal(number, self._receive)
        if sys.platform == "linux":
            signal.signal(LAUNCHER_DIED, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            return  # a forked dataloader worker, which its parent stops
        # A second signal is ignored, because one request can cause two: `kill` or the terminal sends a signal to the
        # process group, and the launcher forwards the signal that it has received.
        if not self.received:
            self.received = number
            self._since = time.monotonic()
        elif number == signal.SIGINT and time.monotonic() - self._since > 1:
            os._exit(128 + signal.SIGINT)


class Request(enum.IntEnum):
    """What a rank requests after a step. All ranks follow the largest request."""

    NOTHING = 0
    ROLLING_SAVE = 1
    SAVE = 2
    MAX_HOURS = 3
    MAX_USD = 4
    SIGNAL = 5


class StepControl(DefaultFlowCallback):
    """Decides after each step whether to log, save, validate or stop."""

    def __init__(self, settings: TrainingSection, run: RunRecord, saver: CheckpointSaver) -> None:
        self.settings = settings
        self.run = run
        self.saver = saver
        self.signals = StopSignals()
        self.reason: str | None = None  # why the run stops before its last step
        self.orphaned = False
        self.rolling = False  # whether the next checkpoint replaces the checkpoint of this step
        self._saved_at = 0.0
        self._rolled_at = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.restart_timers()

    def restart_timers(self) -> None:
        """Measure the times until the next save from now on. A rolling save does not postpone other saves."""
        self._rolled_at = time.monotonic()
        if not self.rolling:
            self._saved_at = self._rolled_at

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        super().on_step_end(args, state, control, **kwargs)
        self.rolling = False
        if state.global_step >= state.max_steps:
            control.should_log = True
            return
        request = Request(ranks.largest(self._request(main=state.is_world_process_zero)))
        if request != Request.NOTHING:
            self.rolling = request == Request.ROLLING_SAVE and not control.should_save
            control.should_save = True
        if request in (Request.MAX_HOURS, Request.MAX_USD, Request.SIGNAL):
            self._stop(request, control)
            control.should_evaluate = False  # the validation is done when the run resumes
        elif self.is_over(state.global_step):
            self.rolling = False
            self.reason = f"--stop_at_step {self.settings.stop_at_step}"
            control.should_save = control.should_training_stop = control.should_log = True
            control.should_evaluate = args.eval_strategy != "no"

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.saver.copier and self.saver.is_warm:  # a validation can take minutes
            self.saver.poll()
        if ranks.largest(self.signals.received):
            self._stop(Request.SIGNAL, control)
            raise Interrupted

    def _stop(self, request: Request, control: Any) -> None:
        """Save a checkpoint and stop the run. A collective: `request` is the same on all ranks."""
        if request == Request.MAX_HOURS:
            self.reason = f"--max_hours {self.settings.max_hours:g}"
        elif request == Request.MAX_USD:
            self.reason = f"--max_usd {self.settings.max_usd:g}"
        else:
            number = ranks.largest(self.signals.received)
            self.orphaned = number == LAUNCHER_DIED
            self.reason = "the launcher died" if self.orphaned else signal.Signals(number).name
        control.should_save = control.should_training_stop = True
        logger.info("Saving a checkpoint and stopping. Reason: %s", self.reason)

    def conclude(self, step: int) -> None:
        """Set the reason of a run that ends at `step`, if no step of this process has set it.

        Raises RunFailed if the rows have ended too early.
        """
        if self.reason is None and step < self.settings.last_step:
            raise RunFailed(f"The training rows ended at step {step}.")
        if self.reason is None and step < self.settings.max_steps:
            self.reason = f"--stop_at_step {self.settings.stop_at_step}"  # an earlier attempt had reached this step

    def is_over(self, step: int) -> bool:
        """Return whether this process stops training after `step`."""
        return self.reason is not None or step >= self.settings.last_step

    def is_due(self, step: int, every: int) -> bool:
        """Return whether an action is due with the validation at `step`. If `every` is 0, it is never due.

        It is due at the first and the last step, and at the first validation at or after each multiple of `every`.
        """
        if not every:
            return False
        if step in (0, self.settings.last_step):
            return True
        previous = max(0, step - self.settings.eval_steps)  # the validation before this one
        return step // every > previous // every

    def _request(self, *, main: bool) -> Request:
        """Return what this rank requests after a step. Only rank 0, `main`, looks at the clock."""
        if self.signals.received:
            return Request.SIGNAL
        if not main:
            return Request.NOTHING
        settings = self.settings
        hours = self.run.seconds() / 3600
        if settings.max_hours and hours >= settings.max_hours:
            return Request.MAX_HOURS
        if settings.max_usd and hours * settings.usd_per_hour >= settings.max_usd:
            return Request.MAX_USD
        if settings.save_strategy == "no":
            return Request.NOTHING
        now = time.monotonic()
        if settings.save_minutes and now - self._saved_at >= 60 * settings.save_minutes:
            return Request.SAVE
        rolling = settings.save_rolling_minutes
        if rolling and now - self._rolled_at >= 60 * rolling and not self.saver.jobs:
            return Request.ROLLING_SAVE
        return Request.NOTHING


class Watchdog(TrainerCallback):
    """Ends this process with stack traces after `seconds` without progress.

    Time in which the process is stopped, by SIGSTOP or with its container, is not counted. A Python thread counts the
    rest. If code that holds the interpreter lock hangs, a C thread ends the process after BACKSTOP times as long.

    Args:
        seconds: a time longer than any compilation or save. 0: no limit.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._record: Callable[[str], None] = lambda reason: None
        self._signs = 0  # of progress
        self._thread: threading.Thread | None = None
        self._disarmed = threading.Event()

    def record_with(self, record: Callable[[str], None]) -> None:
        """Before the process ends, call a function with the reason."""
        self._record = record

    def arm(self, *args: Any, **kwargs: Any) -> None:
        """Restart the timer, because the process has made progress."""
        self._signs += 1
        if self.seconds and self._thread is None:
            self._disarmed.clear()
            self._thread = threading.Thread(target=self._watch, daemon=True)
            self._thread.start()

    on_train_begin = on_substep_end = on_step_end = on_prediction_step = on_evaluate = on_save = arm

    def disarm(self) -> None:
        """Stop the timer that would end this process."""
        if self._thread is not None:
            self._disarmed.set()
            self._thread.join()
            self._thread = None

    def _watch(self) -> None:
        tick = min(5.0, self.seconds / 20)
        idle = 0.0  # seconds without progress
        signs = self._signs
        before = time.monotonic()
        while idle < self.seconds:
            # The default of `file`, sys.stderr, is not a file in a notebook.
            faulthandler.dump_traceback_later(BACKSTOP * self.seconds, exit=True, file=2)
            if self._disarmed.wait(tick):
                faulthandler.cancel_dump_traceback_later()
                return
            now = time.monotonic()
            # A tick takes much longer if the process was stopped meanwhile.
            idle += min(now - before, 2 * tick)
            before = now
            if self._signs != signs:
                signs = self._signs
                idle = 0.0
        message = f"Timeout ({datetime.timedelta(seconds=self.seconds)})!\n"
        os.write(2, message.encode())
        faulthandler.dump_traceback(file=2)
        if console.descriptor is not None:
            console.write(message.encode())
            faulthandler.dump_traceback(file=console.descriptor)
        faulthandler.dump_traceback_later(RECORD_SECONDS, exit=True, file=2)
        try:
            self._record(f"no progress for {self.seconds:g} s (--hang_timeout)")
        finally:
            os._exit(1)

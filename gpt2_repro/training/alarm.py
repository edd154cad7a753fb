"""A run that gets worse, slowly: no update is to blame, so nothing is stopped, and it is not to be found out at the end."""

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from gpt2_repro.files import parse_event, read_lines


logger = logging.getLogger(__name__)

RISES = 3  # validations in a row, each worse than the one before
ABOVE_BEST = 0.5  # nats that the smoothed training loss may lie above its best
STEPS = 100  # that it is smoothed over


class Trend:
    """Whether the losses of a run, event by event of its metrics.jsonl, get worse: `alarm` says how, or is None."""

    def __init__(self) -> None:
        self.alarm: str | None = None
        self._validations: list[float] = []
        self._smoothed = self._best = math.nan
        self._step = 0

    def see(self, event: dict[str, Any]) -> None:
        """Take in one event: a line of training or a validation. Other events are ignored."""
        loss, eval_loss = event.get("loss"), event.get("eval_loss")
        if isinstance(loss, int | float) and math.isfinite(loss):
            weight = 1 - math.exp(-(event["step"] - self._step) / STEPS)
            self._step = event["step"]
            first = math.isnan(self._smoothed)
            self._smoothed = loss if first else self._smoothed + weight * (loss - self._smoothed)
            self._best = self._smoothed if first else min(self._best, self._smoothed)
        if isinstance(eval_loss, int | float):
            self._validations = [*self._validations[-RISES:], eval_loss]
        self.alarm = self._rising() or self._above_best()

    def _rising(self) -> str | None:
        seen = self._validations
        if len(seen) <= RISES or not all(later > earlier for earlier, later in zip(seen, seen[1:], strict=False)):
            return None
        return f"the validation loss has risen {RISES} times in a row, from {seen[0]:.4f} to {seen[-1]:.4f}"

    def _above_best(self) -> str | None:
        if not self._smoothed - self._best > ABOVE_BEST:
            return None
        return f"the training loss over the last {STEPS} steps is {self._smoothed:.4f}, {self._best:.4f} at its best"


class DivergenceAlarm(TrainerCallback):
    """Warns where the losses of the run get worse. The log is its memory: it goes on where the run does.

    Args:
        log: metrics.jsonl.
        report: takes the step and the alarm.
    """

    def __init__(self, log: Path, report: Callable[[int, dict[str, Any]], None]) -> None:
        self.log, self.report = log, report
        self.trend = Trend()

    def replay(self) -> None:
        """Take in the log as it is, before training goes on."""
        for line in read_lines(self.log):
            self.trend.see(parse_event(line) or {})

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        before = self.trend.alarm
        self.trend.see({"step": state.global_step, **(logs or {})})
        if state.is_world_process_zero and self.trend.alarm and not before:
            logger.warning("step %d: %s", state.global_step, self.trend.alarm)
            self.report(state.global_step, {"alarm": self.trend.alarm})

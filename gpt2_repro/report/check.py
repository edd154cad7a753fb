"""Is this run healthy? A line for each sign, from what the run has written."""

import datetime
import statistics
from typing import Literal, NamedTuple

from gpt2_repro.reference_band import explained, verdict
from gpt2_repro.report.facts import facts, progress
from gpt2_repro.report.read import Run, is_number, values
from gpt2_repro.report.trend import risen_training_loss, rising_validation
from gpt2_repro.units import duration


SILENT_SECONDS = 900  # without a word from a run that says it goes on
RECENT = 20  # lines of the log
MUCH_WAITING = 0.05  # of the time of training, for rows


class Sign(NamedTuple):
    """What one look at a run says: ✓ as it should be, ! to be looked at, ✗ not healthy."""

    mark: Literal["✓", "!", "✗"]
    words: str


def signs(run: Run, now: datetime.datetime) -> list[Sign]:
    """Everything that its files tell of a run's health; `now` is aware of its time zone."""
    return [_state(run, now), *_losses(run), *_reference(run), *_speed(run)]


def _state(run: Run, now: datetime.datetime) -> Sign:
    numbers = facts(run)
    said = f"{run.name}: {numbers.state}, {progress(numbers)}"
    if numbers.state in ("failed", "diverged"):
        return Sign("✗", f"{said}: {numbers.reason or 'no reason is written down'}")
    if numbers.state == "running" and numbers.updated:
        silent = (now - datetime.datetime.fromisoformat(numbers.updated)).total_seconds()
        if silent > SILENT_SECONDS:
            return Sign("✗", f"{said}, but has not said so for {duration(silent)}: it hangs or was killed")
    left = f", {duration(numbers.seconds_left)} left at its speed" if numbers.seconds_left is not None else ""
    return Sign("✓" if numbers.state in ("running", "complete") else "!", said + left)


def _losses(run: Run) -> list[Sign]:
    found = []
    if steps := run.non_finite_steps:
        found.append(Sign("✗", f"the loss was not finite at {len(steps)} steps, the last one {steps[-1]:,}"))
    validation = [row["eval_loss"] for row in run.validation if isinstance(row.get("eval_loss"), int | float)]
    training = [row for row in run.training if is_number(row["loss"])]
    trends = (rising_validation(validation), risen_training_loss(training))
    found += [Sign("✗", trend) for trend in trends if trend]
    if skipped := values(run.training, "updates_skipped"):
        found.append(Sign("!", f"{skipped[-1]:,.0f} updates were skipped"))
    return found


def _reference(run: Run) -> list[Sign]:
    """The last validation that has a band."""
    if run.environment.get("reference") is None:
        return []
    measured = [(int(row["step"]), row["eval_loss"]) for row in run.validation if is_number(row.get("eval_loss"))]
    judged = [(step, loss) for step, loss in measured if verdict(step, loss)]
    return [Sign("✓" if verdict(*judged[-1]) == "inside" else "✗", explained(*judged[-1]))] if judged else []


def _speed(run: Run) -> list[Sign]:
    recent = run.training[-RECENT:]
    waits, speeds = (values(recent, key) for key in ("data_wait", "tokens_per_second"))
    if not speeds:
        return []
    said = f"{statistics.median(speeds):,.0f} tokens/s"
    wait = statistics.median(waits) if waits else 0.0
    if wait > MUCH_WAITING:
        return [
            Sign(
                "!",
                f"{said}, {wait:.0%} of the time waiting for rows: more --dataloader_num_workers, or a faster disk",
            )
        ]
    return [Sign("✓", said)]

"""Check whether a run is healthy, based on the files in its run directory."""

import datetime
import itertools
import math
import statistics
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from gpt2_repro.evaluation.references import band, explained, verdict
from gpt2_repro.report.read import Run, reading, values
from gpt2_repro.report.tables import progress
from gpt2_repro.run_record import RunRecord
from gpt2_repro.run_record.layout import FINAL, METRICS, STATUS
from gpt2_repro.text import duration
from gpt2_repro.typed_json import is_number


SILENT_SECONDS = 900  # a running run without a status update for this long counts as hung or killed
RECENT = 20  # number of newest training events used for the speed and the waiting time
MUCH_WAITING = 0.05  # share of the training time spent waiting for rows
RISES = 3  # consecutive validations, each with a higher loss than the previous one
ABOVE_BEST = 0.5  # nats by which the smoothed training loss may exceed its lowest value
STEPS = 100  # time constant for smoothing the training loss, in optimizer steps


class Sign(NamedTuple):
    """The result of one health check: ✓ good, ! warning, ✗ not healthy."""

    mark: Literal["✓", "!", "✗"]
    words: str


def signs(run: Run, now: datetime.datetime) -> list[Sign]:
    """Return the results of all health checks of a run. `now` must have a time zone."""
    return [_state(run, now), *_files(run), *_losses(run), *_reference(run), *_speed(run)]


def _state(run: Run, now: datetime.datetime) -> Sign:
    said = f"{run.name}: {run.status.state}, {progress(run)}"
    if run.status.state in ("failed", "diverged"):
        return Sign("✗", f"{said}: {run.status.reason or 'no reason was recorded'}")
    if run.status.state == "running" and run.status.updated:
        with reading(run.path / STATUS):
            silent = (now - datetime.datetime.fromisoformat(run.status.updated)).total_seconds()
        if silent > SILENT_SECONDS:
            return Sign("✗", f"{said}, last status update {duration(silent)} ago: the run hangs or was killed")
    return Sign("✓" if run.status.state in ("running", "complete") else "!", said)


def _files(run: Run) -> list[Sign]:
    """Check for missing or damaged files."""
    found = []
    if run.status.state == "complete" and RunRecord(run.path).final_defect():
        found.append(Sign("!", f"{FINAL}/ is missing or not complete"))
    logged = max((row["step"] for row in (*run.training, *run.validation) if is_number(row.get("step"))), default=0)
    if run.status.state == "complete" and logged < 0.9 * (run.status.step or 0):
        found.append(Sign("✗", f"{METRICS} ends at step {logged:,.0f}, before the run ended: losses are missing"))
    if run.broken_lines:
        found.append(Sign("✗", f"damaged lines in {METRICS}: {run.broken_lines}. Losses may be missing"))
    return found


def _losses(run: Run) -> list[Sign]:
    found = []
    if steps := run.non_finite_steps:
        found.append(Sign("✗", f"steps with a non-finite training loss: {len(steps)}, last step {steps[-1]:,}"))
    losses = [row["eval_loss"] for row in run.validation if "eval_loss" in row]
    validation = [loss if is_number(loss) else math.nan for loss in losses]  # NaN ends a series of rises
    training = [row for row in run.training if is_number(row["loss"])]
    trends = (rising_validation(validation), risen_training_loss(training))
    found += [Sign("✗", trend) for trend in trends if trend]
    if skipped := values(run.training, "updates_skipped"):
        found.append(Sign("!", f"skipped optimizer updates: at least {skipped[-1]:,.0f}"))
    return found


def _reference(run: Run) -> list[Sign]:
    """Compare the newest validation loss with the published range for the same step."""
    measured = [row for row in run.validation if run.environment.reference and is_number(row.get("eval_loss"))]
    judged = [(int(row["step"]), row["eval_loss"]) for row in measured if band(int(row["step"]))]
    return [Sign("✓" if verdict(*judged[-1]) == "inside" else "✗", explained(*judged[-1]))] if judged else []


def _speed(run: Run) -> list[Sign]:
    speeds, waits = (values(run.training[-RECENT:], key) for key in ("tokens_per_second", "data_wait"))
    if not speeds:
        return []
    said = f"{statistics.median(speeds):,.0f} tokens/s"
    if waits and (wait := statistics.median(waits)) > MUCH_WAITING:
        fix = "increase --dataloader_num_workers or use a faster disk"
        return [Sign("!", f"{said}, {wait:.0%} of the time was spent waiting for rows: {fix}")]
    return [Sign("✓", said)]


def rising_validation(losses: Sequence[float]) -> str | None:
    """Return a message if the loss rose in all of the last RISES validations, or None."""
    last = losses[-RISES - 1 :]
    if len(last) <= RISES or not all(later > earlier for earlier, later in itertools.pairwise(last)):
        return None
    return f"the validation loss rose {RISES} times in a row, from {last[0]:.4f} to {last[-1]:.4f}"


def risen_training_loss(rows: Sequence[dict[str, Any]]) -> str | None:
    """Return a message if the smoothed training loss is far above its lowest value.

    Args:
        rows: training events with a finite `loss`, ordered by step.
    """
    if not rows:
        return None
    smoothed = best = rows[0]["loss"]
    for before, row in itertools.pairwise(rows):
        weight = 1 - math.exp(-(row["step"] - before["step"]) / STEPS)
        smoothed += weight * (row["loss"] - smoothed)
        best = min(best, smoothed)
    if smoothed - best <= ABOVE_BEST:
        return None
    return f"the training loss, smoothed over {STEPS} steps, is {smoothed:.4f}; the lowest was {best:.4f}"

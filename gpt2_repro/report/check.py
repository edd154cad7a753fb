"""Check whether a run is healthy, based on the files in its run directory."""

import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Literal

from gpt2_repro.checkpoints.manifest import defect
from gpt2_repro.evaluation.references import band, explained, verdict
from gpt2_repro.report.ending import ending, last_line, progress
from gpt2_repro.report.read import Row, Run, has_value, values
from gpt2_repro.run_record.layout import CONSOLE, FINAL, METRICS
from gpt2_repro.text import Finding


RECENT = 20  # number of newest training events used for the speed and the waiting time
MUCH_WAITING = 0.05  # share of the training time spent waiting for rows
RISES = 3  # consecutive validations, each with a higher loss than the previous one
ABOVE_BEST = 0.5  # nats by which the smoothed training loss may exceed its lowest value
STILL = "Still"
STEPS = 100  # time constant for smoothing the training loss, in optimizer steps


def findings(run: Run) -> list[Finding]:
    """Return the results of all health checks of a run."""
    return [
        _check_state(run),
        *_check_files(run),
        *_check_losses(run),
        *_check_models_to_beat(run),
        *_check_reference(run),
        *_check_speed(run),
    ]


def headline(run: Run) -> Finding:
    """Return one sentence about a run: the first thing that is wrong, otherwise how good the run is."""
    ended = ending(run)
    if ended:
        return Finding("!" if run.status.state == "stopped" else "✗", "run", ended)
    for finding in findings(run):
        if finding.mark == "✗":
            text = finding.text
            if not text.startswith(METRICS):
                text = text[:1].upper() + text[1:]
            return Finding("✗", "run", f"{text.rstrip('.')}.")
    quality = _quality(run)
    if quality.startswith(STILL):
        return Finding("!", "run", quality)
    return Finding("✓", "run", quality)


def _quality(run: Run) -> str:
    """Return how good the last validation loss of a run is. The text begins with STILL if it is not good yet."""
    validated = [row for row in run.validation if has_value(row, "eval_loss")]
    if not validated:
        return "Training; no validation loss has been logged yet."
    loss = validated[-1]["eval_loss"]
    at = f"at step {validated[-1]['step']:,.0f}"
    name = run.environment.reference
    for row in reversed(validated):
        step = int(row["step"])
        if verdict(name, step, row["eval_loss"]) == "inside":
            return f"Inside {name}'s band at step {step:,}, with a validation loss of {row['eval_loss']:.3f}."
        if band(name, step):
            break
    beaten = {name: other for name, other in run.reference_losses.items() if loss < other}
    if beaten:
        best = min(beaten, key=lambda name: beaten[name])
        return f"Beats {_model(best)} by {beaten[best] - loss:.2f} {at}."
    if run.reference_losses:
        nearest = max(run.reference_losses, key=lambda name: run.reference_losses[name])
        difference = loss - run.reference_losses[nearest]
        return f"{STILL} {difference:.2f} above {_model(nearest)} {at}."
    return f"The validation loss is {loss:.3f} {at}."


def _model(name: str) -> str:
    """Return the name of a model of `reference_losses` in a sentence."""
    if name.startswith("GPT"):
        return name
    return f"the {name} model"


def _check_state(run: Run) -> Finding:
    state = run.status.state
    text = f"{run.name}: {state}, {progress(run)}"
    ended = ending(run)
    if ended:
        text += f". {ended}"
    if state == "stopped":
        return Finding("!", "state", text)
    if ended:
        last = last_line(run)
        if last:
            text += f" The last line in {CONSOLE}: {last}"
        return Finding("✗", "state", text)
    if state in ("running", "complete"):
        return Finding("✓", "state", text)
    return Finding("!", "state", text)


def _check_files(run: Run) -> Iterator[Finding]:
    logged = max(values([*run.training, *run.validation], "step"), default=0)
    if run.broken_lines:
        yield Finding("✗", "files", f"damaged lines in {METRICS}: {run.broken_lines}. Losses may be missing")
    elif run.status.state == "complete" and logged < 0.9 * (run.status.step or 0):
        yield Finding("✗", "files", f"{METRICS} ends at step {logged:,.0f}, before the run ended")
    else:
        yield Finding("✓", "files", f"{METRICS} has no damaged line, up to step {logged:,.0f}")
    if run.status.state == "complete":
        if defect(run.path / FINAL):
            yield Finding("!", "files", f"{FINAL}/ is missing or not complete")
        else:
            yield Finding("✓", "files", f"{FINAL}/ is complete")


def _check_losses(run: Run) -> Iterator[Finding]:
    steps = run.non_finite_steps
    if steps:
        yield Finding("✗", "losses", f"steps with a non-finite training loss: {len(steps)}, last step {steps[-1]:,}")
    elif run.training:
        yield Finding("✓", "losses", "no training loss is NaN or infinite")
    losses = values(run.validation, "eval_loss")
    last = losses[-RISES - 1 :]
    if len(last) > RISES and all(later > earlier for earlier, later in itertools.pairwise(last)):
        text = f"the validation loss rose {RISES} times in a row, from {last[0]:.4f} to {last[-1]:.4f}"
        yield Finding("✗", "losses", text)
    elif len(losses) > 1:
        text = f"the validation loss is {losses[-1]:.4f}; it was {losses[-2]:.4f} before, {min(losses):.4f} at best"
        yield Finding("✓", "losses", text)
    if run.training:
        smoothed, best = smoothed_loss(run.training)
        text = f"the training loss, smoothed over {STEPS} steps, is {smoothed:.4f}; the lowest was {best:.4f}"
        yield Finding("✗" if smoothed - best > ABOVE_BEST else "✓", "losses", text)
    skipped = values(run.training, "updates_skipped")
    if skipped:
        yield Finding("!", "losses", f"skipped optimizer updates: at least {skipped[-1]:,.0f}")
    elif run.training:
        yield Finding("✓", "losses", "no optimizer update was skipped")


def _check_models_to_beat(run: Run) -> Iterator[Finding]:
    """Compare the last validation loss with those of n-gram models and of GPT-2 on the same tokens."""
    losses = values(run.validation, "eval_loss")
    for name, loss in run.reference_losses.items():
        if not losses:
            return
        difference = losses[-1] - loss
        if difference < 0:
            yield Finding("✓", "loss", f"{-difference:.2f} below the {name} model's {loss:.3f}")
        else:
            yield Finding("!", "loss", f"{difference:.2f} above the {name} model's {loss:.3f}")


def _check_reference(run: Run) -> Iterator[Finding]:
    """Compare the last validation loss that has a published range with this range."""
    name = run.environment.reference
    for row in reversed(run.validation):
        step = int(row["step"])
        if has_value(row, "eval_loss") and band(name, step):
            loss = row["eval_loss"]
            mark: Literal["✓", "✗"] = "✓" if verdict(name, step, loss) == "inside" else "✗"
            yield Finding(mark, "reference", explained(name, step, loss))
            return


def _check_speed(run: Run) -> Iterator[Finding]:
    recent = run.training[-RECENT:]
    speeds = values(recent, "tokens_per_second")
    if not speeds:
        return
    text = f"{statistics.median(speeds):,.0f} tokens/s"
    waiting = statistics.median(values(recent, "data_wait") or [0])
    if waiting > MUCH_WAITING:
        yield Finding("!", "speed", f"{text}, {waiting:.0%} of the time was spent waiting for rows")
    else:
        yield Finding("✓", "speed", text)


def smoothed_loss(rows: Sequence[Row]) -> tuple[float, float]:
    """Return the smoothed training loss at the last step, and its lowest value."""
    finite = [row for row in rows if not math.isnan(row["loss"])]
    if not finite:
        return 0.0, 0.0
    smoothed = finite[0]["loss"]
    best = smoothed
    for before, row in itertools.pairwise(finite):
        weight = 1 - math.exp(-(row["step"] - before["step"]) / STEPS)
        smoothed += weight * (row["loss"] - smoothed)
        best = min(best, smoothed)
    return smoothed, best

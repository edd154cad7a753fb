"""The key numbers of a run, formatted with their units."""

import dataclasses
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gpt2_repro.formatting import duration
from gpt2_repro.references import HELLASWAG_ITEMS, Baseline, baseline_of, published_loss
from gpt2_repro.report.read import Run, mapping, values
from gpt2_repro.run_record import RunRecord
from gpt2_repro.run_record.status import is_number


OWN_TEXT = "validation text"  # what a diagnosis calls the main validation set


@dataclasses.dataclass(frozen=True)
class Facts:
    """State and progress of a run; None if the run has not recorded it."""

    state: str
    reason: str | None
    updated: str | None
    step: int | None
    max_steps: int | None
    tokens: int | None
    total_tokens: int | None
    seconds_left: float | None  # at the median speed, while the run is running

    @property
    def progress(self) -> str:
        """`step 200 of 300, 1.6 M tokens, 45 s left`."""
        if self.step is None:
            return "no step logged"
        of = f" of {self.max_steps:,}" if self.max_steps else ""
        left = f", {duration(self.seconds_left)} left" if self.seconds_left is not None else ""
        return f"step {self.step:,}{of}, {count(self.tokens)} tokens{left}"


class KeyNumber(NamedTuple):
    """A number with its label, formatted, and a note to compare it with."""

    label: str
    text: str
    note: str = ""


def facts(run: Run) -> Facts:
    """Return state and progress, from the status or else from the last event."""
    plan = mapping(run.environment.get("plan"))
    last = run.training[-1] if run.training else {}
    state = run.status.state or "unknown"
    tokens = _number(run.status.tokens, last.get("tokens"))
    max_steps = _number(run.status.max_steps, plan.get("max_steps"))
    tokens_per_step = _number(plan.get("tokens_per_step"))
    total_tokens = max_steps * tokens_per_step if max_steps and tokens_per_step else None
    speed = _median(run, "tokens_per_second")
    is_predictable = state == "running" and speed and tokens is not None and total_tokens is not None
    return Facts(
        state=state,
        reason=run.status.reason,
        updated=run.status.updated,
        step=_number(run.status.step, last.get("step")),
        max_steps=max_steps,
        tokens=tokens,
        total_tokens=total_tokens,
        seconds_left=max(0, total_tokens - tokens) / speed if is_predictable else None,
    )


def key_numbers(run: Run) -> list[KeyNumber]:
    """Return the numbers at the head of a report, without those that are unknown."""
    progress, usd_per_hour = facts(run), run.usd_per_hour
    losses = values([dict(run.status.losses), *run.validation], "eval_loss")
    references = ", ".join(f"{name} {loss:.3f}" for name, loss in run.reference_losses.items())
    further = {name: values(run.validation, f"eval_{name}_loss") for name in run.further_sets}
    hellaswag = run.hellaswag[-1] if run.hellaswag else {}
    beside = ", ".join(f"{name} {value:.4f}" for name, value in hellaswag_lines(run).items())
    items = f"of {count(_number(hellaswag.get('hellaswag_items')))} items"
    seconds = run.status.seconds
    usd = seconds / 3600 * usd_per_hour if seconds is not None and usd_per_hour else None
    planned = f"of {count(progress.total_tokens)} planned" if progress.total_tokens else ""
    numbers = [
        ("validation loss (nats/token)", losses[-1] if losses else None, "{:.3f}".format, references),
        ("its best", min(losses, default=None), "{:.3f}".format, ""),
        *((f"loss of {name}", found[-1] if found else None, "{:.3f}".format, "") for name, found in further.items()),
        ("HellaSwag", hellaswag.get("hellaswag_acc"), "{:.4f}".format, beside or items),
        ("parameters", _number(run.environment.get("parameters")), count, ""),
        ("tokens", progress.tokens, count, planned),
        ("tokens/s (median)", _median(run, "tokens_per_second"), "{:,.0f}".format, ""),
        ("MFU (median)", _median(run, "mfu"), "{:.1%}".format, "of the peak FLOP/s"),
        ("padding (median)", _median(run, "padding"), "{:.1%}".format, "of the computed positions"),
        ("time", seconds, duration, ""),
        ("cost", usd, "${:,.2f}".format, f"at ${usd_per_hour:,.2f} an hour"),
    ]
    return [KeyNumber(label, form(value), note) for label, value, form, note in numbers if value is not None]


def _number(*candidates: object) -> Any:
    """Return the first candidate that is a number, or None."""
    return next((value for value in candidates if is_number(value)), None)


def _median(run: Run, key: str) -> float | None:
    found = values(run.training, key)
    return statistics.median(found) if found else None


def baseline_losses(run: Run) -> dict[str, float]:
    """Return the baseline's loss on the run's validation set: measured if there is a diagnosis, else as published.

    A diagnosis scores both models on the same tokens of the set. Its difference is added to the run's own loss.
    """
    losses = [row for row in run.validation if is_number(row.get("eval_loss"))]
    if not losses:
        return {}
    for domain in run.diagnosis.get("domains", []):
        if domain["label"] == OWN_TEXT:
            return {"baseline": losses[-1]["eval_loss"] - domain["difference"]["value"]}
    baseline = _baseline(run)
    request = mapping(mapping(run.environment.get("data")).get("request"))
    loss = published_loss(baseline, request, losses[-1].get("eval_tokens"))
    return {} if loss is None else {baseline.name: loss}


def _baseline(run: Run) -> Baseline:
    """Return the GPT-2 with the nearest number of parameters that work on a token."""
    return baseline_of(_number(run.environment.get("active_parameters"), run.environment.get("parameters")))


def hellaswag_lines(run: Run) -> dict[str, float]:
    """Return the scores of GPT-2 and GPT-3 of the nearest size, if the run scored the whole validation split."""
    baseline = _baseline(run)
    whole = run.hellaswag and run.hellaswag[-1].get("hellaswag_items") == HELLASWAG_ITEMS
    of_gpt3 = baseline.name.replace("GPT-2", "GPT-3")
    return {baseline.name: baseline.hellaswag, of_gpt3: baseline.gpt3_hellaswag} if whole else {}


def why_not_comparable(runs: Sequence[Run]) -> list[str]:
    """Return sentences on recorded differences that make the numbers of the runs incomparable."""
    data = [mapping(run.environment.get("data")) for run in runs]
    reasons = []
    if len({one["tokenizer_sha256"] for one in data if one.get("tokenizer_sha256")}) > 1:
        reasons.append(
            "The runs have different tokenizers: their losses per token do not compare. Bits per byte do: run "
            "bash evaluate.sh with all of them."
        )
    elif len({digest for one in data if (digest := mapping(one.get("sha256")).get("validation"))}) > 1:
        reasons.append("The runs validate on different rows: their losses do not compare, but scores of tasks do.")
    if len({items for run in runs for items in values(run.hellaswag[-1:], "hellaswag_items")}) > 1:
        reasons.append("The runs were scored on different items of HellaSwag: their accuracies do not compare.")
    return reasons


def count(number: float | None) -> str:
    """Return `9.89 B`, `124.4 M` or `16,384`; a dash if unknown."""
    if number is None:
        return "–"
    if abs(number) >= 1e9:
        return f"{number / 1e9:.2f} B"
    if abs(number) >= 1e6:
        return f"{number / 1e6:.1f} M"
    return f"{number:,.0f}"


def where_things_are(run: Run) -> dict[str, Path]:
    """Return the paths of the model, the metrics and the evaluation, if they exist."""
    record = RunRecord(run.path)
    files = {
        "model": record.final,
        "metrics": record.metrics,
        "evaluation": run.path / "evaluation" / "comparison.md",
    }
    return {name: path for name, path in files.items() if path.exists()}

"""The key numbers of a run, and numbers as a person reads them, with their units."""

import dataclasses
import datetime
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpt2_repro.baselines import HELLASWAG_ITEMS, Baseline, baseline_of, published_loss
from gpt2_repro.report.read import Run, is_number, mapping, values


# What the manifest's reference models are called in full.
REFERENCE_NAMES = {"bigram": "interpolated bigram"}
OWN_TEXT = "validation text"  # what a diagnosis calls the main validation set


@dataclasses.dataclass(frozen=True)
class Facts:
    """The numbers that stand at the head of a report; None where the run has not said."""

    state: str
    reason: str | None
    updated: str | None
    step: int | None
    max_steps: int | None
    tokens: int | None
    total_tokens: int | None
    validation_loss: float | None  # nats per token, the last one
    best_loss: float | None  # of all validations
    further_losses: dict[str, float]  # the same of each further validation set, by its name
    tokens_per_second: float | None  # median over the steps
    mfu: float | None  # median, a fraction of the peak
    padding: float | None  # median, a fraction of the positions; None where rows are full
    seconds: float | None
    parameters: int | None
    hellaswag: float | None  # accuracy, the last one
    hellaswag_items: int | None
    usd: float | None

    @property
    def seconds_left(self) -> float | None:
        """How long the rest takes at the median speed; None unless the run goes on."""
        if self.state != "running" or not self.tokens_per_second or self.total_tokens is None or self.tokens is None:
            return None
        return max(0, self.total_tokens - self.tokens) / self.tokens_per_second


def facts(run: Run) -> Facts:
    """Gather the key numbers, from run_status.json where it has them, otherwise from the last events."""
    plan = mapping(run.environment.get("plan"))
    last = run.training[-1] if run.training else {}
    max_steps = _number(run.status.get("max_steps"), plan.get("max_steps"))
    tokens_per_step = _number(plan.get("tokens_per_step"))
    losses = values([run.status, *run.validation], "eval_loss")
    speeds, mfus, paddings = (values(run.training, key) for key in ("tokens_per_second", "mfu", "padding"))
    further = {name: values(run.validation, f"eval_{name}_loss") for name in run.further_sets}
    seconds = _number(run.status.get("seconds"))
    scored = run.hellaswag[-1] if run.hellaswag else {}
    return Facts(
        state=str(run.status.get("state", "unknown")),
        reason=run.status.get("reason"),
        updated=_date(run.status.get("updated")),
        step=_number(run.status.get("step"), last.get("step")),
        max_steps=max_steps,
        tokens=_number(run.status.get("tokens"), last.get("tokens")),
        total_tokens=max_steps * tokens_per_step if max_steps and tokens_per_step else None,
        validation_loss=losses[-1] if losses else None,
        best_loss=min(losses, default=None),
        further_losses={name: found[-1] for name, found in further.items() if found},
        tokens_per_second=statistics.median(speeds) if speeds else None,
        mfu=statistics.median(mfus) if mfus else None,
        padding=statistics.median(paddings) if paddings else None,
        seconds=seconds,
        parameters=_number(run.environment.get("parameters")),
        hellaswag=scored.get("hellaswag_acc"),
        hellaswag_items=_number(scored.get("hellaswag_items")),
        usd=seconds / 3600 * run.usd_per_hour if seconds is not None and run.usd_per_hour else None,
    )


def _number(*candidates: object) -> Any:
    """The first that is a number, None where none is."""
    return next((value for value in candidates if is_number(value)), None)


def _date(value: object) -> str | None:
    """A date in ISO form as it is written; None for anything else."""
    try:
        datetime.datetime.fromisoformat(str(value))
    except ValueError:
        return None
    return str(value)


def baseline_losses(run: Run) -> dict[str, float]:
    """The loss of the baseline on the run's validation set: measured where there is a diagnosis, else as published.

    A diagnosis scores both models on the same tokens of the set: their difference there, from the run's own loss.
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
    """The GPT-2 of the size that works on a token."""
    active = _number(run.environment.get("active_parameters"))
    return baseline_of(active or _number(run.environment.get("parameters")))


def hellaswag_lines(run: Run) -> dict[str, float]:
    """What GPT-2 and GPT-3 of the nearest size have, where the whole validation split was scored."""
    baseline = _baseline(run)
    whole = run.hellaswag and run.hellaswag[-1].get("hellaswag_items") == HELLASWAG_ITEMS
    of_gpt3 = baseline.name.replace("GPT-2", "GPT-3")
    return {baseline.name: baseline.hellaswag, of_gpt3: baseline.gpt3_hellaswag} if whole else {}


def why_not_comparable(runs: Sequence[Run]) -> list[str]:
    """Sentences on what makes numbers of these runs numbers of different things; as far as the runs say."""
    data = [mapping(run.environment.get("data")) for run in runs]
    reasons = []
    if len({one["tokenizer_sha256"] for one in data if one.get("tokenizer_sha256")}) > 1:
        reasons.append(
            "The runs have different tokenizers: their losses per token do not compare. Bits per byte do: bash evaluate.sh "
            "with all of them."
        )
    elif len({digest for one in data if (digest := mapping(one.get("sha256")).get("validation"))}) > 1:
        reasons.append("The runs validate on different rows: their losses do not compare, but scores of tasks do.")
    if len({items for run in runs if (items := facts(run).hellaswag_items)}) > 1:
        reasons.append("The runs were scored on different items of HellaSwag: their accuracies do not compare.")
    return reasons


def count(number: float | None) -> str:
    """`9.89 B`, `124.4 M`, `16,384`; a dash for what is unknown."""
    if number is None:
        return "–"
    if abs(number) >= 1e9:
        return f"{number / 1e9:.2f} B"
    if abs(number) >= 1e6:
        return f"{number / 1e6:.1f} M"
    return f"{number:,.0f}"


def loss_text(loss: float | None) -> str:
    """A loss in nats per token, without its unit."""
    return f"{loss:.3f}" if loss is not None and is_number(loss) else "–"


def reference_name(name: str) -> str:
    """A reference model's name in full."""
    return REFERENCE_NAMES.get(name, name)


def progress(numbers: Facts) -> str:
    """`step 300 of 300, 2.5 M tokens`."""
    if numbers.step is None:
        return "no step logged"
    of = f" of {numbers.max_steps:,}" if numbers.max_steps else ""
    return f"step {numbers.step:,}{of}, {count(numbers.tokens)} tokens"


def where_things_are(run: Run) -> dict[str, Path]:
    """What a reader wants next beside the report; only what is there."""
    files = {
        "model": run.path / "final",
        "metrics": run.path / "metrics.jsonl",
        "evaluation": run.path / "evaluation" / "comparison.md",
    }
    return {name: path for name, path in files.items() if path.exists()}

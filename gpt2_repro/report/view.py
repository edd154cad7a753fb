"""The content of the page for one run: texts and tables for the template."""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from gpt2_repro.comparison import comparison_table, diagnosis_tables
from gpt2_repro.report.facts import (
    Facts,
    baseline_losses,
    count,
    facts,
    hellaswag_lines,
    loss_text,
    progress,
    reference_name,
    where_things_are,
)
from gpt2_repro.report.read import COMPARISON, DIAGNOSIS, Row, Run, mapping, reading
from gpt2_repro.report.tables import (
    Table,
    bill_table,
    count_table,
    deviation_table,
    flatten,
    validation_table,
)
from gpt2_repro.units import duration


STATE_MARKS = {"complete": "✓", "running": "●", "stopped": "■", "failed": "✕", "diverged": "✕"}


@dataclasses.dataclass(frozen=True)
class Tile:
    """A key number with its label, and its unit or a number to compare with."""

    label: str
    value: str
    note: str


def view_run(run: Run, label: str) -> dict[str, Any]:
    """Return the variables of the template for one run."""
    numbers, data = facts(run), mapping(run.environment.get("data"))
    samples = sorted(run.samples, key=lambda row: -row["step"])
    with reading(run.path / COMPARISON):
        comparison = Table(*comparison_table(run.comparison)) if run.comparison else None
    with reading(run.path / DIAGNOSIS):
        diagnosis = (
            {title: Table(*table) for title, table in diagnosis_tables(run.diagnosis).items()} if run.diagnosis else {}
        )
    return {
        "label": label,
        "run": run,
        "numbers": numbers,
        "mark": STATE_MARKS.get(numbers.state, "?"),
        "progress": progress(numbers),
        "left": duration(numbers.seconds_left) if numbers.seconds_left is not None else None,
        "tiles": _tiles(run, numbers),
        "references": [(reference_name(name), loss_text(loss)) for name, loss in run.reference_losses.items()],
        "validation": validation_table(run),
        "samples": samples,
        "newest": samples[0]["step"] if samples else None,
        "has_hellaswag_lines": bool(hellaswag_lines(run)),
        "baselines": _baseline_sentences(run),
        "diagnosis": diagnosis,
        "bill": bill_table(run),
        "price": f"${run.usd_per_hour:,.2f} an hour" if run.usd_per_hour else None,
        "deviations": deviation_table(run) if isinstance(run.environment.get("deviations"), list) else None,
        "comparison": comparison,
        "data": _pairs(data, without=("counts", "reference_losses")),
        "counts": count_table(data),
        "environment": _pairs(run.environment, without=("data", "deviations", "trajectory")),
        "missing": run.missing(),
        "files": [{"key": name, "value": path} for name, path in where_things_are(run).items()],
    }


def _tiles(run: Run, numbers: Facts) -> list[Tile]:
    loss, bigram = numbers.validation_loss, run.reference_losses.get("bigram")
    losses = {"Validation loss": loss}
    losses |= {f"Validation, {name}": value for name, value in numbers.further_losses.items()}
    tiles = [Tile(label, loss_text(value), "nats per token") for label, value in losses.items()]
    if loss is not None and bigram is not None:
        difference = f"{loss - bigram:+.3f}".replace("-", "−")
        tiles.append(
            Tile(f"vs {reference_name('bigram')}", difference, f"nats per token, from its {loss_text(bigram)}")
        )
    if numbers.hellaswag is not None:
        beside = ", ".join(f"{name} {value:.4f}" for name, value in hellaswag_lines(run).items())
        tiles.append(
            Tile("HellaSwag", f"{numbers.hellaswag:.4f}", beside or f"of {count(numbers.hellaswag_items)} items")
        )
    planned = f"of {count(numbers.total_tokens)} planned" if numbers.total_tokens else "tokens"
    tiles.append(Tile("Tokens seen", count(numbers.tokens), planned))
    tiles.append(Tile("Parameters", count(numbers.parameters), "as trained"))
    tiles.append(Tile("Time", duration(numbers.seconds), "wall time"))
    measured = (
        ("Cost", numbers.usd, "${:,.2f}", f"at ${run.usd_per_hour:,.2f} an hour"),
        ("Speed", numbers.tokens_per_second, "{:,.0f}", "tokens/s, median"),
        ("MFU", numbers.mfu, "{:.1%}", "of the peak FLOP/s, median"),
        ("Padding", numbers.padding, "{:.1%}", "of the computed positions, median"),
    )
    return tiles + [Tile(label, form.format(its), note) for label, its, form, note in measured if its is not None]


def _baseline_sentences(run: Run) -> list[str]:
    return [
        f"Dashed, baseline: {run.diagnosis['models'][1]['name']}, by the difference that the diagnosis measured."
        if name == "baseline"
        else f"Dashed, {name}: OpenAI's model on this validation set, as published (gpt2_repro/baselines.py)."
        for name in baseline_losses(run)
    ]


def _pairs(tree: Row, without: Sequence[str]) -> list[Row]:
    """Return the entries of a nested mapping that have no other place on the page."""
    entries = flatten({key: value for key, value in tree.items() if key not in without})
    return [{"key": key, "value": _text(value)} for key, value in entries.items() if value is not None]


def _text(value: object) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"{value:.4g}" if isinstance(value, float) else f"{value:,}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

"""The content of the page for one run: texts and tables for the template."""

import json
from collections.abc import Sequence
from typing import Any

from gpt2_repro.comparison import diagnosis_tables
from gpt2_repro.report.facts import baseline_losses, facts, key_numbers, where_things_are
from gpt2_repro.report.read import COMPARISON, DIAGNOSIS, Row, Run, mapping, reading
from gpt2_repro.report.tables import count_table, deviation_table, flatten, time_table, validation_table


def view_run(run: Run, label: str) -> dict[str, Any]:
    """Return the variables of the template for one run."""
    data = mapping(run.environment.get("data"))
    samples = sorted(run.samples, key=lambda row: -row["step"])
    with reading(run.path / COMPARISON):
        comparison = run.comparison.table() if run.comparison else None
    with reading(run.path / DIAGNOSIS):
        diagnosis = diagnosis_tables(run.diagnosis) if run.diagnosis else {}
    return {
        "label": label,
        "run": run,
        "facts": facts(run),
        "numbers": key_numbers(run),
        "validation": validation_table(run),
        "samples": samples,
        "newest": samples[0]["step"] if samples else None,
        "baselines": list(baseline_losses(run)),
        "diagnosis": diagnosis,
        "time": time_table(run),
        "deviations": deviation_table(run) if isinstance(run.environment.get("deviations"), list) else None,
        "comparison": comparison,
        "data": _pairs(data, without=("counts", "reference_losses")),
        "counts": count_table(data),
        "environment": _pairs(run.environment, without=("data", "deviations", "run_identity")),
        "missing": run.missing(),
        "files": [{"key": name, "value": path} for name, path in where_things_are(run).items()],
    }


def _pairs(tree: Row, without: Sequence[str]) -> list[Row]:
    """Return the entries of a nested mapping, without those that the page shows elsewhere."""
    entries = flatten({key: value for key, value in tree.items() if key not in without})
    return [{"key": key, "value": _text(value)} for key, value in entries.items() if value is not None]


def _text(value: object) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"{value:.4g}" if isinstance(value, float) else f"{value:,}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

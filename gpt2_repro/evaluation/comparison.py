"""The table that compares models: pure functions from the harness's results to one dictionary and its Markdown."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class ComparedModel:
    """A column of the table."""

    name: str
    source: str  # a folder, a Hub id or "untrained"
    parameters: int
    tokens_trained: int | None  # None where unknown


def compare(
    results_by_model: Mapping[str, Mapping[str, Any]],
    baseline: str | None,
    *,
    models: Sequence[ComparedModel],
    date: str,
    command: str,
    max_length: int,
    limit: int | None,
    versions: Mapping[str, str],
) -> dict[str, Any]:
    """What comparison.json holds. `difference` is a model's value minus the baseline's.

    `higher_is_better` is None where the harness does not say, as for some groups of tasks.

    Args:
        results_by_model: the harness's results by the model's name.
        baseline: a name among them, or None.
    """
    first = next(iter(results_by_model.values()))
    rows = []
    for task, metrics in first["results"].items():
        for key in metrics:
            if _is_metric(key, metrics[key]):
                values = {name: _value(results["results"][task], key) for name, results in results_by_model.items()}
                rows.append(
                    {
                        "task": task,
                        "metric": _shown_metric(key),
                        "higher_is_better": first["higher_is_better"].get(task, {}).get(key.split(",")[0]),
                        "values": values,
                        "difference": _differences(values, baseline),
                    }
                )
    return {
        "date": date,
        "command": command,
        "tasks": list(first["results"]),
        "task_details": {task: _details(first, task) for task in first["results"]},
        "max_length": max_length,
        "limit": limit,
        "dtype": "float32",
        "baseline": baseline,
        "models": [dataclasses.asdict(model) for model in models],
        "versions": dict(versions),
        "rows": rows,
    }


def _is_metric(key: str, value: Any) -> bool:
    """Metrics are named `<metric>,<filter>`; alias, sample_len and the standard errors stand beside them."""
    return "," in key and not key.split(",")[0].endswith("_stderr") and isinstance(value, int | float)


def _shown_metric(key: str) -> str:
    metric, filter_name = key.split(",", 1)
    return metric if filter_name == "none" else f"{metric} ({filter_name})"


def _value(metrics: Mapping[str, Any], key: str) -> dict[str, float | None]:
    metric, filter_name = key.split(",", 1)
    return {"value": _finite(metrics[key]), "stderr": _finite(metrics.get(f"{metric}_stderr,{filter_name}"))}


def _finite(value: Any) -> float | None:
    """None for the harness's "N/A", and for what JSON cannot hold."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _differences(values: Mapping[str, Mapping[str, float | None]], baseline: str | None) -> dict[str, float]:
    anchor = None if baseline is None else values[baseline]["value"]
    return {
        name: entry["value"] - anchor
        for name, entry in values.items()
        if name != baseline and anchor is not None and entry["value"] is not None
    }


def _details(results: Mapping[str, Any], task: str) -> dict[str, Any]:
    """A task's version, the number of its documents that were scored, and its data; a group has only its version."""
    config = results.get("configs", {}).get(task, {})
    files = (config.get("dataset_kwargs") or {}).get("data_files") or {}
    source = (config.get("metadata") or {}).get("source")
    return {
        "version": results.get("versions", {}).get(task),
        "documents": results.get("n-samples", {}).get(task, {}).get("effective"),
        "data": source or next(iter(files.values()), config.get("dataset_path")),
    }

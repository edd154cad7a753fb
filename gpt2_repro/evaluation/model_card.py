"""Write the model card: architecture, data, recipe, evaluation, use and limits."""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from gpt2_repro.checkpoints.checkpoint import HUB_ID
from gpt2_repro.evaluation.comparison import Comparison, ComparisonRow
from gpt2_repro.evaluation.output import render
from gpt2_repro.evaluation.tasks import LOCAL_TASKS, LocalTask
from gpt2_repro.run_record.environment import TrainingRecord
from gpt2_repro.run_record.layout import ENVIRONMENT, RECIPE
from gpt2_repro.text import Cell, Table


def model_card(
    name: str,
    record: TrainingRecord,
    comparison: Comparison | None = None,
    column: str | None = None,
    license_id: str | None = None,
) -> str:
    """Return the model card as Markdown with the metadata header of the Hub.

    Args:
        name: the title of the card, and the name of the model in the card's code example.
        comparison: the evaluation results. Results of a smoke test are omitted.
        column: the name of this model in `comparison`.
        license_id: the license of the weights. It does not follow from the license of the data.
    """
    rows = _rows(comparison, column)
    header: dict[str, Any] = {"license": license_id} if license_id else {}
    header |= {"library_name": "transformers", "pipeline_tag": "text-generation", **_origin(record)}
    if rows and column:
        header["model-index"] = [{"name": name, "results": _results(rows, column)}]
    card = render(
        "model_card.md.j2",
        name=name,
        header=yaml.safe_dump(header, sort_keys=False, allow_unicode=True),
        record=record,
        source=json.dumps(_shorten_files(record.environment.data["source"])),
        rows=rows,
        comparison=comparison,
        table=_scores(rows, comparison, column) if comparison else "",
        deviations=deviation_table(record.environment.deviations),
        recipe_file=RECIPE,
        environment_file=ENVIRONMENT,
    )
    # Absolute paths are shortened to their last part, because they are valid on one machine only.
    return re.sub(r"(?<![\w./-])/(?:[^\s/\"',=]+/)+", "", card)


def _origin(record: TrainingRecord) -> dict[str, Any]:
    """Return the Hub datasets and the base model, each only if it is known."""
    source, start = record.environment.data.get("source", {}), record.environment.run_identity.get("init_from", "")
    sources = source.get("sources", [source])
    is_hub_id = HUB_ID.fullmatch(start) and not start.startswith("runs/") and not Path(start).exists()
    known = {
        "datasets": sorted({one["repository"] for one in sources if "repository" in one}),
        "base_model": start.rstrip("/") if is_hub_id else None,
    }
    return {key: value for key, value in known.items() if value}


def _rows(comparison: Comparison | None, column: str | None) -> list[ComparisonRow]:
    if comparison is None or column is None or comparison.limit is not None:
        return []
    return [row for row in comparison.rows if (score := row.values.get(column)) and score.value is not None]


def _results(rows: list[ComparisonRow], column: str) -> list[dict[str, Any]]:
    """Return the evaluation results in the format that the Hub uses in model cards."""
    results: dict[str, dict[str, Any]] = {}
    for row in rows:
        data = LOCAL_TASKS.get(row.task, LocalTask("", "test", [], []))
        of = {"name": data.title or row.task, "type": data.dataset or row.task, "split": data.split}
        result = {"task": {"type": "text-generation"}, "dataset": of, "metrics": []}
        metric = {"type": row.metric, "name": row.metric, "value": round(row.values[column].value or 0.0, 4)}
        results.setdefault(row.task, result)["metrics"].append(metric)
    return list(results.values())


def _scores(rows: list[ComparisonRow], comparison: Comparison, column: str | None) -> str:
    """Return the table of the scores of this model and of the baseline."""
    names = {name: "this model" if name == column else name for name in (column, comparison.baseline) if name}
    return dataclasses.replace(comparison, rows=rows).table(names).markdown()


def _shorten_files(value: Any) -> Any:
    """Return a data source's description with at most three names of each list of files."""
    if isinstance(value, list):
        return list(map(_shorten_files, value))
    if not isinstance(value, Mapping):
        return value
    names = [Path(file["path"]).name for file in value.get("files", ())]
    files = {"files": names[:3] + ([f"and {len(names) - 3} more"] if len(names) > 3 else [])} if names else {}
    return {key: _shorten_files(part) for key, part in {**value, **files}.items()}


def deviation_table(deviations: Sequence[Mapping[str, str]] | None) -> Table:
    """Return a table of the training settings that differ from recipes/gpt2_124m.yaml."""
    # Paths of data files are valid on one machine only.
    portable = [one for one in deviations or () if one["field"] != "data.data_files"]
    rows = [[Cell(one[key].replace("|", "/")) for key in ("field", "run", "recipe")] for one in portable]
    return Table(["field", "this run", "recipe"], rows)

"""Tables of the report as rows of cells, for the page and the terminal."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from gpt2_repro import comparison
from gpt2_repro.comparison import Cell, Table
from gpt2_repro.report.facts import key_numbers
from gpt2_repro.report.read import Row, Run, mapping, reading
from gpt2_repro.run_record.layout import COMPARISON, DIAGNOSIS
from gpt2_repro.time_breakdown import breakdown


def count_table(manifest: Mapping[str, Any]) -> Table:
    """Return documents, tokens and rows of each split."""
    splits = {name: mapping(counts) for name, counts in mapping(manifest.get("counts")).items()}
    return _records("split", {name: counts for name, counts in splits.items() if counts})


def evaluation_table(run: Run) -> Table:
    """Return the scores of the evaluation. Raises UserError if comparison.json is damaged."""
    with reading(run.path / COMPARISON):
        return run.comparison.table() if run.comparison else Table([], [])


def diagnosis_tables(run: Run) -> dict[str, Table]:
    """Return the tables of the diagnosis by title. Raises UserError if diagnosis.json is damaged."""
    with reading(run.path / DIAGNOSIS):
        return {title: Table(*table) for title, table in comparison.diagnosis_tables(run.diagnosis).items()}


def validation_table(run: Run) -> Table:
    """Return every validation with its losses and scores."""
    units = {key: f"{key} (nats/token)" for row in run.validation for key in row if key.endswith("loss")}
    rows = {row["step"]: {units.get(key, key): row[key] for key in row} for row in run.validation}
    return _records("step", rows, without=("step", "time"))


def _records(name: str, records: Mapping[Any, Row], without: Sequence[str] = ()) -> Table:
    """Return one row per record, with a column for each key of any of them."""
    columns = [key for key in dict.fromkeys(key for row in records.values() for key in row) if key not in without]
    rows = [[_plain(label), *(_plain(row.get(key)) for key in columns)] for label, row in records.items()]
    return Table([name, *columns], rows)


def time_table(run: Run) -> Table:
    """Return the time breakdown: times, shares and, if the price is known, dollars."""
    price = run.environment.usd_per_hour
    rows = breakdown(run.status.time_breakdown, usd_per_hour=price)
    headers = ["what for", "minutes", "share", *(["cost"] if price else [])]
    return Table(headers, [[Cell(row[0]), *(Cell(text, "number") for text in row[1:])] for row in rows])


def deviation_table(run: Run) -> Table:
    """Return the fields that differ from the default recipe and change what is learned."""
    deviations = run.environment.deviations or []
    rows = [[Cell(its.get(key, "–")) for key in ("field", "run", "recipe")] for its in deviations]
    return Table(["field", "here", "gpt2_124m"], rows)


def run_table(runs: Sequence[Run], labels: Sequence[str]) -> Table:
    """Return the key numbers of several runs, one run per row."""
    texts = [{number.label: number.text for number in key_numbers(run)} for run in runs]
    columns = list(dict.fromkeys(name for row in texts for name in row))
    rows = [
        [Cell(label), Cell(str(run.status.state)), *(Cell(row.get(name, "–"), "number") for name in columns)]
        for label, run, row in zip(labels, runs, texts, strict=True)
    ]
    return Table(["run", "state", *columns], rows)


def recipe_differences(runs: Sequence[Run], labels: Sequence[str]) -> Table:
    """Return the recipe keys whose values differ between the runs."""
    recipes = [{key: json.dumps(value, default=str) for key, value in flatten(run.recipe).items()} for run in runs]
    keys = dict.fromkeys(key for recipe in recipes for key in recipe)
    rows = [[key, *(recipe.get(key, "–") for recipe in recipes)] for key in keys]
    return Table(["key", *labels], [[Cell(text) for text in row] for row in rows if len(set(row[1:])) > 1])


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a nested mapping with dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def entries(tree: Row, without: Sequence[str] = ()) -> dict[str, str]:
    """Return a nested mapping as texts with dotted keys, without those that the page shows elsewhere."""
    flat = flatten({key: value for key, value in tree.items() if key not in without})
    return {key: _text(value) for key, value in flat.items() if value is not None}


def _text(value: object) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"{value:.4g}" if isinstance(value, float) else f"{value:,}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def aligned(table: Table) -> list[str]:
    """Return the table as lines of text, with numbers on the right."""
    lines = [[Cell(header, row.kind) for header, row in zip(table.headers, table.rows[0], strict=True)], *table.rows]
    columns = []
    for column in zip(*lines, strict=True):
        width = max(len(cell.text) for cell in column)
        columns.append([f"{cell.text:{'>' if cell.kind == 'number' else '<'}{width}}" for cell in column])
    return ["  ".join(cells).rstrip() for cells in zip(*columns, strict=True)]


def _plain(value: object) -> Cell:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return Cell(f"{value:,}" if isinstance(value, int) else f"{value:.4f}", "number")
    return Cell("–" if value is None else str(value))

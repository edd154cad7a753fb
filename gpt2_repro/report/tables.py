"""Tables of the report as rows of cells, for the page and the terminal alike."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from gpt2_repro.comparison import Cell
from gpt2_repro.report.facts import count, facts, loss_text
from gpt2_repro.report.read import Row, Run, mapping
from gpt2_repro.time_breakdown import breakdown
from gpt2_repro.units import duration


@dataclasses.dataclass(frozen=True)
class Table:
    headers: list[str]
    rows: list[list[Cell]]


def count_table(manifest: dict[str, Any]) -> Table:
    """Return documents, tokens and rows of each split."""
    splits = {name: mapping(counts) for name, counts in mapping(manifest.get("counts")).items()}
    return _records("split", {name: counts for name, counts in splits.items() if counts})


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


def bill_table(run: Run) -> Table:
    """Where the time went: times, shares and, if the price is known, dollars."""
    lines = breakdown(run.accounts, usd_per_hour=run.usd_per_hour)
    cells = [[line.name, duration(line.seconds), f"{line.share:.1%}", f"${line.usd or 0:,.2f}"] for line in lines]
    headers = ["what for", "minutes", "share", "cost"][: 4 if run.usd_per_hour else 3]
    rows = [[Cell(name), *(Cell(text, "number") for text in texts)] for name, *texts in cells]
    return Table(headers, [row[: len(headers)] for row in rows])


def deviation_table(run: Run) -> Table:
    """The fields that differ from the default recipe and change what is learned."""
    rows = [
        [Cell(str(mapping(its).get(key, "–"))) for key in ("field", "run", "recipe")]
        for its in run.environment.get("deviations") or []
    ]
    return Table(["field", "here", "gpt2_124m"], rows)


def run_table(runs: Sequence[Run], labels: Sequence[str]) -> Table:
    """Return the key numbers of several runs, one run per row."""
    rows = []
    for label, numbers in zip(labels, map(facts, runs), strict=True):
        texts = {
            "parameters": count(numbers.parameters),
            "tokens": count(numbers.tokens),
            "validation loss (nats/token)": loss_text(numbers.validation_loss),
            "its best": loss_text(numbers.best_loss),
            "HellaSwag": _format("{:.4f}", numbers.hellaswag),
            "tokens/s (median)": _format("{:,.0f}", numbers.tokens_per_second),
            "MFU": _format("{:.1%}", numbers.mfu),
            "time": duration(numbers.seconds),
            "cost": _format("${:,.2f}", numbers.usd),
        }
        rows.append([Cell(label), Cell(numbers.state), *(Cell(text, "number") for text in texts.values())])
    return Table(["run", "state", *texts], rows)


def _format(form: str, number: float | None) -> str:
    return "–" if number is None else form.format(number)


def recipe_differences(runs: Sequence[Run], labels: Sequence[str]) -> Table:
    """The recipe keys on which the runs do not agree."""
    recipes = [{key: json.dumps(value, default=str) for key, value in flatten(run.recipe).items()} for run in runs]
    keys = list(dict.fromkeys(key for recipe in recipes for key in recipe))
    rows = [[key, *(recipe.get(key, "–") for recipe in recipes)] for key in keys]
    return Table(["key", *labels], [[Cell(text) for text in row] for row in rows if len(set(row[1:])) > 1])


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested mapping as dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def aligned(table: Table) -> list[str]:
    """The table as lines of text, numbers to the right."""
    lines = [[Cell(header, row.kind) for header, row in zip(table.headers, table.rows[0], strict=True)], *table.rows]
    widths = [max(len(line[column].text) for line in lines) for column in range(len(table.headers))]
    return ["  ".join(_pad(cell, width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]


def _pad(cell: Cell, width: int) -> str:
    return cell.text.rjust(width) if cell.kind == "number" else cell.text.ljust(width)


def _plain(value: object) -> Cell:
    if isinstance(value, int) and not isinstance(value, bool):
        return Cell(f"{value:,}", "number")
    if isinstance(value, float):
        return Cell(f"{value:.4f}", "number")
    return Cell("–" if value is None else str(value))

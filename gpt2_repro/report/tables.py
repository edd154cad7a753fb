"""Write a table of runs for a paper or a program."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from gpt2_repro.errors import UserError
from gpt2_repro.files import write_whole
from gpt2_repro.report.page import key_numbers, scores_of
from gpt2_repro.report.read import Run, last_value
from gpt2_repro.report.seeds import Setting, group, mean_as_text
from gpt2_repro.text import Cell, Table, count


class TableFile(NamedTuple):
    """The file of a table in one form."""

    suffix: str
    beginning: str  # of its text


# By the value of --table.
TABLES = {
    "csv": TableFile(".csv", "run,setting,seed,data_seed,"),
    "latex": TableFile(".tex", "% Written by gpt2_repro.report.\n"),
    "markdown": TableFile(".md", "<!-- Written by gpt2_repro.report. -->\n\n"),
}
NO_NUMBER = "–"
METRICS = {
    "validation loss": "eval_loss",
    "averaged weights": "eval_EMA_loss",
    "bits per byte": "eval_bits_per_byte",
    "HellaSwag": "hellaswag_acc",
}


def table_path(page: Path, form: str) -> Path:
    """Return the path of a table in a form of TABLES next to the page.

    Raises UserError if it is a file that was not written by `write_table`.
    """
    table = TABLES[form]
    path = page.with_suffix(table.suffix)
    if path.exists():
        with path.open(encoding="utf-8", errors="replace") as file:
            beginning = file.read(len(table.beginning))
        if beginning != table.beginning:
            raise UserError(f"{path} was not written by --table. Delete it, or pass another -o FILE.html.")
    return path


def write_table(runs: Sequence[Run], labels: Sequence[str], path: Path, form: str) -> None:
    """Write a table in a form of TABLES."""
    if form == "csv":
        text = runs_csv(runs, labels)
    elif form == "latex":
        text = TABLES[form].beginning + paper_table(runs, labels).latex()
    else:
        text = TABLES[form].beginning + paper_table(runs, labels).markdown() + "\n"
    write_whole(path, text)


def runs_csv(runs: Sequence[Run], labels: Sequence[str]) -> str:
    """Return one line per run, with numbers that are not rounded. Runs of one setting differ only in the seed."""
    lines: list[dict[str, object]] = []
    columns = dict.fromkeys(("run", "setting", "seed", "data_seed", "state", "step"))  # the keys, in order
    settings: dict[str, int] = {}
    for run, label in zip(runs, labels, strict=True):
        setting = settings.setdefault(run.setting, len(settings) + 1)
        line: dict[str, object] = {
            "run": label,
            "setting": setting,
            "state": run.status.state,
            "step": run.status.step,
        }
        line["seed"], line["data_seed"] = run.seed_pair
        for number in key_numbers(run):
            line[number.label] = number.value
        line.update(scores_of(run))
        columns.update(dict.fromkeys(line))
        lines.append(line)
    file = io.StringIO()
    writer = csv.DictWriter(file, list(columns), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return file.getvalue()


def paper_table(runs: Sequence[Run], labels: Sequence[str]) -> Table:
    """Return one row per setting: the mean of its seeds ± their standard deviation, the lowest loss first."""
    settings = sorted(group(runs, labels), key=_order)
    columns: dict[str, None] = {}  # the keys, in order
    for setting in settings:
        for run in setting.runs:
            columns.update(dict.fromkeys(_numbers(run)))
    known = [*[name for name in METRICS if name in columns], *[name for name in columns if name not in METRICS]]
    table = Table(["setting", "seeds", "parameters", "tokens", *known], [])
    for setting in settings:
        first = setting.runs[0]
        texts = [str(len(setting.runs)), count(first.environment.parameters or None), count(first.status.tokens)]
        for column in known:
            numbers = [_numbers(run).get(column) for run in setting.runs]
            found = [number for number in numbers if number is not None]
            text = NO_NUMBER
            if found:
                text = mean_as_text(found)
                if len(found) < len(numbers):
                    text += f" ({len(found)} of {len(numbers)} seeds)"
            texts.append(text)
        row = [Cell(setting.name)]
        row += [Cell(text, "number") for text in texts]
        table.rows.append(row)
    return table


def _order(setting: Setting) -> float:
    return setting.mean if setting.losses else float("inf")


def _numbers(run: Run) -> dict[str, float]:
    """Return the last losses and the scores of a run, by column."""
    numbers: dict[str, float] = {}
    for name, key in METRICS.items():
        value = last_value(run.validation, key)
        if value is not None:
            numbers[name] = value
    numbers.update(scores_of(run))
    return numbers

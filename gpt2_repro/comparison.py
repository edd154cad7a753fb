"""The scores of several models, their differences and verdicts, and the tables of comparison.json and diagnosis.json."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from gpt2_repro.typed_json import from_json


# Two models are called equal if they differ by less than this: in points of 1 for accuracies, otherwise as a fraction of
# the baseline's value. All perplexities of a text are the same number in other units: 5 % of a word's perplexity is
# 1.4 % of bits per byte.
MARGINS = {
    **dict.fromkeys(("acc", "acc_norm", "completion"), 0.02),
    **dict.fromkeys(("perplexity", "word_perplexity"), 0.05),
    **dict.fromkeys(("bits_per_byte", "nats_per_token"), 0.014),
    "byte_perplexity": 0.01,
}
ARROWS = {True: " ↑", False: " ↓", None: ""}
MOST_COLUMNS = 4  # models; a table of more has one row per model
DIAGNOSIS_TABLES = {
    "domains": "Loss by domain",
    "positions": "Loss by position in the window, of rows that fill it",
    "frequencies": "Loss by how often a token stands in a million",
    "starts": "Loss by place in a document, after a start token",
    "bare": "Loss by place in a document, without a start token",
    "start_cost": "What the start token adds to the loss",
    "ends": "Loss at the end of a document, after 64 tokens or the window",
    "whole": "Log-probability of a passage's last word after the whole passage",
    "sentence": "Log-probability of a passage's last word after its last sentence alone",
    "gain": "What the text before the last sentence adds to the log-probability of the last word",
}


class Cell(NamedTuple):
    """A text and its kind: "number", "better", "worse", "even", or "" for plain text."""

    text: str
    kind: str = ""


class Table(NamedTuple):
    """Headers and rows of cells."""

    headers: list[str]
    rows: list[list[Cell]]

    def markdown(self) -> str:
        """Return the table as Markdown, right-aligned from the first column of numbers on."""
        first = next((column for row in self.rows for column, cell in enumerate(row) if cell.kind == "number"), 1)
        rule = ["---:" if column >= first else "---" for column in range(len(self.headers))]
        texts = [[cell.text for cell in row] for row in self.rows]
        return "\n".join(f"| {' | '.join(cells)} |" for cells in (self.headers, rule, *texts))


@dataclasses.dataclass(frozen=True)
class Score:
    """A model's value of a metric, and its standard error over the documents."""

    value: float | None
    stderr: float | None = None


@dataclasses.dataclass(frozen=True)
class Difference:
    """A model's value minus the baseline's."""

    value: float
    stderr: float | None = None  # paired; None if the two were not scored on the same documents
    low: float | None = None  # the 95 % interval
    high: float | None = None
    # better, worse, matches, inconclusive or "too few documents (20 of 30)"; None if nothing is judged
    verdict: str | None = None

    @property
    def kind(self) -> str:
        """The kind of its cell."""
        return self.verdict if self.verdict in ("better", "worse") else "even" if self.verdict else ""


@dataclasses.dataclass(frozen=True)
class ComparedModel:
    """A column of the table."""

    name: str
    source: str = ""  # a folder, a Hub id or "untrained"
    parameters: int | None = None
    tokens_trained: int | None = None  # None if unknown
    revision: str | None = None  # None if the numbers are published and were not measured
    published_by: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class TaskDetails:
    """The version of a task, its number of documents (None for a group of tasks) and the source of its data."""

    version: Any
    documents: int | None
    data: str | None


@dataclasses.dataclass(frozen=True)
class ComparisonRow:
    """One metric of one task: values and differences by the name of the model.

    `higher_is_better` is None if lm-eval does not define it, as for some groups of tasks.
    """

    task: str
    metric: str
    higher_is_better: bool | None
    values: dict[str, Score]
    difference: dict[str, Difference]

    @property
    def heading(self) -> str:
        """The metric, with an arrow that points to better values."""
        return self.metric + ARROWS[self.higher_is_better]

    def score(self, model: str) -> str:
        """Return the value ± its standard error; "-" if there is none."""
        score = self.values.get(model, Score(None))
        return "-" if score.value is None else self._with_stderr(score.value, score.stderr)

    def change(self, model: str) -> Cell:
        """Return the difference to the baseline with its verdict."""
        if (difference := self.difference.get(model)) is None:
            return Cell("-")
        shown = self._with_stderr(difference.value, difference.stderr, sign="+")
        return Cell(f"{shown} {difference.verdict or ''}".rstrip(), difference.kind)

    def _with_stderr(self, value: float, stderr: float | None, *, sign: str = "") -> str:
        """Format a number with the decimals that fit the largest value of the row."""
        scale = max((abs(score.value) for score in self.values.values() if score.value is not None), default=0)
        decimals = 4 if scale < 10 else 2 if scale < 10_000 else 0
        error = "" if stderr is None else f" ± {stderr:,.{decimals}f}"
        return (f"{value:{sign},.{decimals}f}" + error).replace("-", "−")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """What comparison.json holds: models, a row per metric, and the settings that were the same for all models.

    Args:
        tasks: of the rows, with subtasks and groups.
        limit: documents per task of a smoke test, in which nothing is judged.
        baseline: the name of a model, or None.
    """

    max_length: int = 0
    batch_size: int = 0
    seed: int = 0
    device: str = ""
    date: str = ""
    command: str = ""
    versions: dict[str, str] = dataclasses.field(default_factory=dict)
    tasks: list[str] = dataclasses.field(default_factory=list)
    task_details: dict[str, TaskDetails] = dataclasses.field(default_factory=dict)
    limit: int | None = None
    dtype: str = "float32"
    baseline: str | None = None
    models: list[ComparedModel] = dataclasses.field(default_factory=list)
    warnings: list[str] = dataclasses.field(default_factory=list)
    rows: list[ComparisonRow]

    @classmethod
    def from_json(cls, text: str) -> "Comparison":
        """Read what `to_json` returned. Only `rows` must be there.

        Raises ValueError, TypeError, AttributeError or RecursionError for anything else.
        """
        return from_json(cls, json.loads(text))

    def to_json(self) -> str:
        """Return the content of comparison.json."""
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    def table(self, names: Mapping[str, str] | None = None) -> Table:
        """Return the table for screen, Markdown, report and model card.

        Args:
            names: the models to show, with their headings. None shows all by name.
        """
        names = names or {model.name: model.name for model in self.models}
        if len(names) > MOST_COLUMNS:
            return self._trend()
        compared = [name for name in names if self.baseline in names and name != self.baseline]
        headers = ["task", "metric", *names.values()]
        headers += [f"{names[name]} − {self.baseline}" if len(compared) > 1 else "difference" for name in compared]
        rows = []
        for row in self.rows:
            scores = [Cell(row.score(name), "number") for name in names]
            rows.append([Cell(row.task), Cell(row.heading), *scores, *map(row.change, compared)])
        return Table(headers, rows)

    def _trend(self) -> Table:
        """One row per model, for many checkpoints of a run by the tokens they were trained on."""
        rows = []
        for model in self.models:
            tokens = "-" if model.tokens_trained is None else f"{model.tokens_trained:,}"
            cells = [Cell(model.name), Cell(tokens, "number")]
            for row in self.rows:
                difference = row.difference.get(model.name)
                verdict = f" ({difference.verdict})" if difference and difference.verdict else ""
                cells.append(Cell(row.score(model.name) + verdict, (difference and difference.kind) or "number"))
            rows.append(cells)
        return Table(["model", "tokens trained", *(f"{row.task} {row.heading}" for row in self.rows)], rows)


def diagnosis_tables(diagnosis: Mapping[str, Any]) -> dict[str, Table]:
    """Return the tables of a diagnosis.json by their titles."""
    headers = ["", "tokens", *(model["name"] for model in diagnosis["models"]), "difference"]
    tables = {DIAGNOSIS_TABLES[name]: diagnosis.get(name) for name in DIAGNOSIS_TABLES}
    return {title: Table(headers, list(map(_bucket, buckets))) for title, buckets in tables.items() if buckets}


def _bucket(bucket: Mapping[str, Any]) -> list[Cell]:
    difference, error = bucket["difference"]["value"], bucket["difference"]["stderr"]
    shown = f"{difference:+.3f}" + ("" if error is None else f" ± {error:.3f}")
    texts = [f"{bucket['tokens']:,}", f"{bucket['ours']:.3f}", f"{bucket['theirs']:.3f}", shown]
    return [Cell(bucket["label"]), *(Cell(text.replace("-", "−"), "number") for text in texts)]

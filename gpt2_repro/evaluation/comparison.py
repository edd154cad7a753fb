"""Store the scores of several models in comparison.json, and format tables."""

import csv
import dataclasses
import io
import json
import statistics
from collections.abc import Mapping
from typing import Any

from gpt2_repro.files import from_json, to_json
from gpt2_repro.text import Cell, Table


# The titles of the tables of diagnosis.json.
DIAGNOSIS_TABLES = {
    "domains": "Loss by domain",
    "positions": "Loss by position in the window, for rows that fill the window",
    "frequencies": "Loss by token frequency (occurrences per million tokens)",
    "ends": "Loss on the separator at the end of a document",
    "starts": "Loss by position after a separator (1: the first token of a document)",
}
CLEAN = " (clean)"  # end of the name of a metric without the documents that overlap with the training data
ARROWS = {True: " ↑", False: " ↓", None: ""}
UNTRAINED = "untrained"  # name and source of a model with random weights
MOST_COLUMNS = 4  # models; a table of more models has one row per model


@dataclasses.dataclass(frozen=True)
class Difference:
    """The difference in a metric: a model's value minus the baseline's value."""

    value: float
    stderr: float | None = None  # paired; None if the models were not scored on the same documents
    low: float | None = None  # lower end of the 95 % confidence interval
    high: float | None = None  # upper end of the interval
    # better, worse, matches, inconclusive or "too few documents (20 of 30)"; None if not judged
    verdict: str | None = None
    small: str | None = None  # better or worse, if a difference that matches is significant

    @property
    def kind(self) -> str:
        """The kind of the table cell: better, worse or even, or "" if `verdict` is None."""
        if not self.verdict:
            return ""
        if self.verdict in ("better", "worse"):
            return self.verdict
        return "even"


@dataclasses.dataclass(frozen=True)
class Score:
    """A model's value of a metric, and its standard error over the task's documents."""

    value: float | None
    stderr: float | None = None
    seeds: list[float] = dataclasses.field(default_factory=list)  # the scores of several seeds, whose mean `value` is
    published: float | None = None  # this model's score in references.yaml
    difference: Difference | None = None  # from the baseline

    @property
    def verdict(self) -> str:
        """The verdict on the difference as text, with what it rests on, or "" if it is not judged."""
        difference = self.difference
        if difference is None or not difference.verdict:
            return ""
        text = difference.verdict
        if difference.small:
            text = f"{difference.small}, and small"
        if text.startswith(("better", "worse")) and len(self.seeds) < 2:
            text += " (one seed)"  # the interval does not contain seeds
        return text


NO_SCORE = Score(None)
# Of comparison.csv. `low` and `high` are the ends of the 95 % interval of the difference.
CSV_COLUMNS = [
    *["task", "metric", "model", "value", "stderr", "seeds"],
    *["difference", "difference_stderr", "low", "high", "verdict"],
]


@dataclasses.dataclass(frozen=True)
class ComparedModel:
    """A model in a comparison."""

    name: str
    source: str = ""  # a folder, a Hub id or "untrained"
    parameters: int | None = None
    tokens_trained: int | None = None  # None if unknown
    revision: str = ""
    seeds: list[str] = dataclasses.field(default_factory=list)  # the names of the models whose mean this is
    is_local: bool | None = None  # whether `source` is a folder or a file, and no Hub id. None: unknown
    weights: str = ""  # which weights of a run with --ema_steps
    has_separator: bool = True  # if not, the first token of each document is context and is not scored
    lossy_tasks: list[str] = dataclasses.field(default_factory=list)  # whose text the tokenizer does not keep


@dataclasses.dataclass(frozen=True)
class TaskDetails:
    """A task's version, data source and number of documents (None for a group of tasks).

    `overlap` is the number of documents that share text with the training data, None if unknown.
    """

    version: Any = None
    documents: int | None = None
    data: str | None = None
    overlap: int | None = None


@dataclasses.dataclass(frozen=True)
class ComparisonRow:
    """One metric of one task. The keys of `values` are model names."""

    task: str
    metric: str
    higher_is_better: bool | None  # None if lm-eval does not define it, for example for some groups of tasks
    values: dict[str, Score]

    @property
    def is_judged(self) -> bool:
        """Whether a difference has a verdict."""
        return any(score.verdict for score in self.values.values())

    @property
    def heading(self) -> str:
        """The metric's name, followed by ↑ if higher is better, or ↓ if lower is better."""
        return self.metric + ARROWS[self.higher_is_better]

    @property
    def form(self) -> str:
        """The format of numbers, which depends on the largest value."""
        largest = 0.0
        for score in self.values.values():
            if score.value is not None:
                largest = max(largest, abs(score.value))
        if largest >= 1e9:  # the perplexity of a model that has learned nothing
            return ".2e"
        if largest >= 10_000:
            return ",.0f"
        if largest >= 10:
            return ",.2f"
        return ",.4f"

    def show(self, score: Score) -> str:
        """Return a score as text: its value ± its standard error, and what is known of its seeds."""
        text = self._with_error(score.value, score.stderr)
        if score.value is None:
            return text
        if len(score.seeds) > 1:
            text += f"; {len(score.seeds)} seeds ± {statistics.stdev(score.seeds):{self.form}}"
        if score.published is not None:
            text += f" (published {score.published:{self.form}})"
        return text.replace("-", "−")

    def show_seeds(self, score: Score) -> str:
        """Return the scores of a model's seeds as text."""
        return ", ".join(self._with_error(seed) for seed in score.seeds)

    def change(self, model: str) -> Cell:
        """Return the difference between a model and the baseline, with the verdict."""
        score = self.values.get(model, NO_SCORE)
        difference = score.difference
        if difference is None:
            return Cell("-")
        text = self._with_error(difference.value, difference.stderr, sign="+")
        if difference.small and difference.verdict:
            low = self._with_error(difference.low, sign="+")
            high = self._with_error(difference.high, sign="+")
            text += f" [{low}, {high}]"
        return Cell(f"{text} {score.verdict}".rstrip(), difference.kind)

    def _with_error(self, value: float | None, stderr: float | None = None, *, sign: str = "") -> str:
        """Return a number ± its standard error as text, or "-" without a number."""
        if value is None:
            return "-"
        text = f"{value:{sign}{self.form}}"
        if stderr is not None:
            text += f" ± {stderr:{self.form}}"
        return text.replace("-", "−")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """The settings of an evaluation, the same for all models of a comparison.

    Args:
        max_length: window in tokens. Longer inputs are truncated on the left.
        limit: the number of documents per task in a smoke test, or None to score all documents. A smoke test does not
            decide which model is better.
    """

    max_length: int = 0
    batch_size: int = 0
    seed: int = 0
    device: str = ""
    limit: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison(EvaluationSettings):
    """The content of comparison.json: models, settings and one row per metric.

    The keys of `task_details` are the names of the tasks in the rows, including groups of tasks.
    """

    date: str = ""
    command: str = ""
    versions: dict[str, str] = dataclasses.field(default_factory=dict)
    task_details: dict[str, TaskDetails] = dataclasses.field(default_factory=dict)
    dtype: str = "float32"
    baseline: str | None = None
    models: list[ComparedModel] = dataclasses.field(default_factory=list)
    rows: list[ComparisonRow]

    @classmethod
    def from_json(cls, text: str) -> "Comparison":
        """Parse the text of comparison.json. Only the key `rows` is required.

        Raises ValueError or RecursionError if the text is damaged.
        """
        return from_json(cls, json.loads(text))

    def to_json(self) -> str:
        """Return the text of comparison.json."""
        return to_json(dataclasses.asdict(self), indent=2) + "\n"

    def table(self, names: Mapping[str, str] | None = None) -> Table:
        """Return the scores and differences as a table with one column per model.

        With more than MOST_COLUMNS models, the table has one row per model instead.

        Args:
            names: the models to show, as a dict from model name to heading. None shows all models.
        """
        if not names:
            names = {model.name: model.name for model in self.models}
        if len(names) > MOST_COLUMNS:
            return self._trend()
        compared: list[str] = []
        if self.baseline in names:
            compared = [name for name in names if name != self.baseline]
        headers = ["task", "metric", *names.values()]
        if len(compared) == 1:
            headers.append("difference")
        else:
            headers += [f"{names[name]} − {self.baseline}" for name in compared]
        rows: list[list[Cell]] = []
        for row in self.rows:
            cells = [Cell(row.task), Cell(row.heading)]
            for name in names:
                score = row.values.get(name, NO_SCORE)
                cells.append(Cell(row.show(score), "number"))
            for name in compared:
                cells.append(row.change(name))
            rows.append(cells)
        return Table(headers, rows)

    def csv(self) -> str:
        """Return the scores as CSV: one line per task, metric and model."""
        file = io.StringIO()
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(CSV_COLUMNS)
        for row in self.rows:
            for model, score in row.values.items():
                difference = score.difference
                of_difference: list[object] = [None] * 4
                if difference is not None:
                    of_difference = [difference.value, difference.stderr, difference.low, difference.high]
                seeds = max(1, len(score.seeds))
                scores = [score.value, score.stderr, seeds, *of_difference, score.verdict]
                writer.writerow([row.task, row.metric, model, *scores])
        return file.getvalue()

    def _trend(self) -> Table:
        """Return a table with one row per model, to compare many checkpoints."""
        rows: list[list[Cell]] = []
        for model in sorted(self.models, key=lambda model: model.tokens_trained or 0):
            tokens = "-"
            if model.tokens_trained is not None:
                tokens = f"{model.tokens_trained:,}"
            cells = [Cell(model.name), Cell(tokens, "number")]
            for row in self.rows:
                score = row.values.get(model.name, NO_SCORE)
                text = row.show(score)
                if score.verdict:
                    text += f" ({score.verdict})"
                kind = "number"
                if score.difference is not None and score.difference.verdict:
                    kind = score.difference.kind
                cells.append(Cell(text, kind))
            rows.append(cells)
        headers = ["model", "tokens trained"]
        headers += [f"{row.task} {row.heading}" for row in self.rows]
        return Table(headers, rows)


def diagnosis_tables(diagnosis: Mapping[str, Any]) -> dict[str, Table]:
    """Return the tables of a parsed diagnosis.json as a dict from title to table."""
    models = [model["name"] for model in diagnosis["models"]]
    headers = ["", "tokens", *models, "difference"]
    tables: dict[str, Table] = {}
    for name, title in DIAGNOSIS_TABLES.items():
        buckets = diagnosis.get(name)
        if buckets:
            tables[title] = Table(headers, [_bucket(bucket) for bucket in buckets])
    return tables


def _bucket(bucket: Mapping[str, Any]) -> list[Cell]:
    error = bucket["difference"]["stderr"]
    difference = f"{bucket['difference']['value']:+.3f}"
    if error is not None:
        difference += f" ± {error:.3f}"
    texts = [f"{bucket['tokens']:,}", f"{bucket['ours']:.3f}", f"{bucket['theirs']:.3f}", difference]
    cells = [Cell(bucket["label"])]
    for text in texts:
        cells.append(Cell(text.replace("-", "−"), "number"))
    return cells

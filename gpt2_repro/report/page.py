"""Write the report as one self-contained HTML file, and as text for the terminal."""

import base64
import dataclasses
import datetime
import math
import re
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jinja2

from gpt2_repro.errors import UserError
from gpt2_repro.evaluation.comparison import NO_SCORE, Comparison, ComparisonRow
from gpt2_repro.evaluation.model_card import deviation_table
from gpt2_repro.files import write_whole
from gpt2_repro.report.check import headline
from gpt2_repro.report.ending import median, progress
from gpt2_repro.report.read import Row, Run, has_value, last_value, values
from gpt2_repro.report.seeds import setting_table
from gpt2_repro.run_record.time_breakdown import breakdown
from gpt2_repro.text import Cell, Table, count, duration, in_terminal


TITLE = "GPT-2 training report"
REFRESH = 60  # seconds after which a browser loads the page of a running run again
PERPLEXITY = re.compile("perplexity|nats_per_token")
SAMPLE_CHARACTERS = 300  # length limit of the sample in the terminal


def require_own_page(output: Path, folder: Path) -> None:
    """Raise UserError if a page or a folder of figures exists that `write_page` did not write.

    The folder is ours if its page is. For several runs, both lie in the user's current folder.
    """
    if output.is_file():
        with output.open(encoding="utf-8", errors="replace") as file:
            if TITLE in file.read(20_000):
                return
    has_files = folder.is_dir() and any(folder.iterdir())
    for path, exists in ((output, output.exists()), (folder, has_files)):
        if exists:
            raise UserError(f"{path} was not written by this command. Pass -o FILE.html, or run it in another folder.")


def write_page(runs: Sequence[Run], output: Path, folder: Path | None = None) -> None:
    """Write a report as an HTML page to `output`, and its figures as PNG and SVG files to `folder`."""
    from gpt2_repro.report.plots import figures  # matplotlib takes a second to load

    labels = label_runs(runs)
    pictures = figures(runs, labels)
    if folder:
        for name, picture in pictures.items():
            write_whole(folder / f"{name}.png", picture.png)
            write_whole(folder / f"{name}.svg", picture.svg)
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(
        loader=loader,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["base64"] = _base64
    date = datetime.datetime.now().astimezone().isoformat(sep=" ", timespec="minutes")
    html = environment.get_template("page.html.j2").render(
        title=TITLE,
        progress=progress,
        headline=headline,
        refresh=REFRESH if any(run.is_live for run in runs) else None,
        key_numbers=key_numbers,
        breakdown=breakdown,
        deviation_table=deviation_table,
        sample_text=sample_text,
        runs=list(zip(runs, labels, strict=True)),
        figures=pictures,
        not_comparable=not_comparable(runs),
        run_table=run_table(runs, labels),
        settings=setting_table(runs, labels),
        differences=recipe_differences(runs, labels),
        date=date,
    )
    write_whole(output, html.encode())


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode()


def label_runs(runs: Sequence[Run]) -> list[str]:
    """Return a label for each run: the name of its directory, with its parent's name if needed."""
    names = [run.name for run in runs]
    if len(set(names)) == len(names):
        return names
    labels: list[str] = []
    for run in runs:
        path = run.path.resolve()
        labels.append("/".join(path.parts[-2:]))
    return labels


def summary(run: Run, page: Path) -> list[str]:
    """Return the summary of a run for the terminal. The last line names `page`."""
    lines = [headline(run).text]
    numbers = Table(["", "", ""], [])
    for number in key_numbers(run):
        cells = [Cell(number.label), Cell(number.text, "number"), Cell(number.note)]
        numbers.rows.append(cells)
    lines += numbers.lines()[1:]
    if run.comparison:
        rows = _without_perplexities(run.comparison) or run.comparison.rows
        shown = dataclasses.replace(run.comparison, rows=rows)
        lines.append("")
        lines += shown.table().lines()
        lines.append("")
    lines += run.missing().values()
    if run.samples:
        newest = run.samples[-1]
        text = in_terminal(f"{newest['prompt']}{sample_text(newest)}", SAMPLE_CHARACTERS)
        lines += textwrap.wrap(f"sample: {text}", 98, subsequent_indent="  ")
    lines.append(f"report: {page}")
    indented = [f"  {line}".rstrip() for line in lines]
    return [f"{run.name}: {run.status.state}, {progress(run)}", *indented]


def _without_perplexities(comparison: Comparison) -> list[ComparisonRow]:
    return [row for row in comparison.rows if not PERPLEXITY.search(row.metric)]


@dataclasses.dataclass
class KeyNumber:
    """A number at the top of a report, with its label and a note."""

    label: str
    value: float | None  # None: unknown
    form: Callable[[Any], str]
    note: str = ""
    parts: Sequence[str] = ()  # what the number is the sum of; folded on the page

    @property
    def text(self) -> str:
        return self.form(self.value)


def key_numbers(run: Run) -> list[KeyNumber]:
    """Return the numbers at the top of a report. Unknown numbers are omitted."""
    numbers = [*_losses_and_scores(run), *_numbers_of_training(run)]
    return [number for number in numbers if number.value is not None]


def _losses_and_scores(run: Run) -> list[KeyNumber]:
    validated = [row for row in run.validation if has_value(row, "eval_loss")]
    last: Row = validated[-1] if validated else {}
    note = f"at step {last.get('step')}"
    for name, loss in run.reference_losses.items():
        note += f", {name} {loss:.3f}"
    numbers = [KeyNumber("validation loss (nats/token)", last.get("eval_loss"), "{:.3f}".format, note)]
    best = min(validated, key=lambda row: row["eval_loss"], default=last)
    if best is not last:
        note = f"at step {best['step']}"
        numbers.append(KeyNumber("best validation loss", best["eval_loss"], "{:.3f}".format, note))
    if run.expected:
        expected, basis = run.expected
        numbers.append(KeyNumber("expected last loss", expected, "{:.2f}".format, basis))
    numbers.append(KeyNumber("bits per byte", last.get("eval_bits_per_byte"), "{:.4f}".format))
    for name in run.further_sets:
        loss_of_set = _last(run, f"eval_{name}_loss")
        bits = _last(run, f"eval_{name}_bits_per_byte")
        note = "" if bits is None else f"{bits:.4f} bits per byte"
        numbers.append(KeyNumber(f"loss of {name}", loss_of_set, "{:.3f}".format, note))
    scores = [f"{name} {score:.4f}" for name, score in run.reference_scores.items()]
    numbers.append(KeyNumber("HellaSwag", _last(run, "hellaswag_acc"), "{:.4f}".format, ", ".join(scores)))
    return numbers


def _numbers_of_training(run: Run) -> list[KeyNumber]:
    environment = run.environment
    seconds = run.status.seconds
    startup = sum(environment.startup.values())
    phases = [f"{name} {of_phase:.1f} s" for name, of_phase in environment.startup.items()]
    price = environment.usd_per_hour or 0
    peaks = values(run.training, "peak_memory_gb")
    cost = (seconds or 0) / 3600 * price
    return [
        KeyNumber("non-finite training losses", len(run.non_finite_steps) or None, count, "steps"),
        KeyNumber("parameters", environment.parameters or None, count),
        KeyNumber("tokens", run.status.tokens, count),
        KeyNumber("tokens/s", median(run, "tokens_per_second"), "{:,.0f}".format, "median"),
        KeyNumber("MFU", median(run, "mfu"), "{:.1%}".format, "median"),
        KeyNumber("peak GPU memory", max(peaks, default=None), "{:.1f} GB".format, "tensors of one GPU"),
        KeyNumber("padding", median(run, "padding"), "{:.1%}".format, "median"),
        KeyNumber("time", seconds, duration),
        KeyNumber("last start-up", startup or None, duration, parts=phases),
        KeyNumber("cost", cost or None, "${:,.2f}".format, f"at ${price:,.2f} an hour"),
    ]


def _last(run: Run, key: str) -> float | None:
    return last_value(run.validation, key)


def not_comparable(runs: Sequence[Run]) -> list[str]:
    """Return the reasons why the numbers of the runs cannot be compared."""
    reasons: list[str] = []
    tokenizers: list[object] = []
    texts: list[object] = []
    for run in runs:
        manifest = run.environment.data
        tokenizers.append(manifest.get("tokenizer_sha256"))
        texts.append(manifest.get("sha256", {}).get("validation"))
    if _differ(tokenizers):
        reasons.append(
            "The runs use different tokenizers. Compare only their bits per byte (evaluate.sh with all runs)."
        )
    elif _differ(texts):
        reasons.append("The runs use different validation sets. Task scores can be compared, but losses cannot.")
    tokens = [_last(run, "eval_tokens") for run in runs]
    if _differ(tokens):
        reasons.append("The runs were validated on different numbers of tokens. Their losses cannot be compared.")
    steps = [run.status.step for run in runs]
    if _differ(steps):
        reasons.append("The runs have different numbers of steps.")
    items = [_last(run, "hellaswag_items") for run in runs]
    if _differ(items):
        reasons.append("The runs were scored on different HellaSwag items. Their accuracies cannot be compared.")
    return reasons


def _differ(known: Sequence[object]) -> bool:
    """Return whether there are two different values. None is not a value."""
    return len(set(known) - {None}) > 1


def sample_text(sample: dict[str, Any]) -> str:
    """Return the text generated after the prompt, without several blank lines in a row."""
    generated = sample["text"].removeprefix(sample["prompt"])
    return re.sub(r"\n(?:[ \t\r]*\n)+", "\n\n", generated).rstrip()


@dataclasses.dataclass(frozen=True)
class RunEntry:
    """A run of a table, with the texts of its row by column."""

    run: Run
    label: str
    texts: dict[str, str]

    @property
    def loss(self) -> float:
        """The last validation loss. A run without one is the last in the table."""
        return _last(self.run, "eval_loss") or math.inf


def run_table(runs: Sequence[Run], labels: Sequence[str]) -> Table:
    """Return a table of the key numbers of several runs, the run with the lowest loss first."""
    entries: list[RunEntry] = []
    columns: dict[str, None] = {}  # the keys, in order
    for run, label in zip(runs, labels, strict=True):
        texts = {number.label: number.text for number in key_numbers(run)}
        for name, score in scores_of(run).items():
            texts[name] = f"{score:.4f}"
        columns.update(dict.fromkeys(texts))
        entries.append(RunEntry(run, label, texts))
    entries.sort(key=lambda entry: entry.loss)
    rows: list[list[Cell]] = []
    for entry in entries:
        state = f"{entry.run.status.state}, {progress(entry.run)}"
        row = [Cell(entry.label), Cell(state)]
        for column in columns:
            text = entry.texts.get(column, "–")
            row.append(Cell(text, "number"))
        rows.append(row)
    return Table(["run", "state", *columns], rows)


def scores_of(run: Run) -> dict[str, float]:
    """Return the scores of a run's evaluation, without perplexities and means over seeds."""
    scores: dict[str, float] = {}
    if not run.comparison or run.comparison.limit is not None:
        return scores
    model = run.comparison.models[0].name
    for row in _without_perplexities(run.comparison):
        score = row.values.get(model, NO_SCORE)
        if score.value is not None and len(score.seeds) < 2:
            scores[f"{row.task} {row.metric}"] = score.value
    return scores


def recipe_differences(runs: Sequence[Run], labels: Sequence[str]) -> Table:
    """Return a table of the recipe fields whose values differ between the runs."""
    fields: dict[str, None] = {}  # the keys, in order
    recipes: list[dict[str, str]] = []
    for run in runs:
        recipe = _flat_recipe(run)
        recipes.append(recipe)
        fields.update(dict.fromkeys(recipe))
    rows: list[list[Cell]] = []
    for field in fields:
        texts = [recipe.get(field, "–") for recipe in recipes]
        if len(set(texts)) > 1:
            rows.append([Cell(text) for text in [field, *texts]])
    return Table(["field", *labels], rows)


def _flat_recipe(run: Run) -> dict[str, str]:
    """Return the values of a run's recipe as text, by names such as `training.seed`."""
    values_as_text: dict[str, str] = {}
    for section, keys in run.recipe.items():
        for key, value in keys.items():
            values_as_text[f"{section}.{key}"] = str(value)
    return values_as_text

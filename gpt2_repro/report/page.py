"""Write the report as one self-contained HTML file, and as text for the terminal."""

import base64
import dataclasses
import datetime
import math
import os
import re
import statistics
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jinja2

from gpt2_repro.evaluation.model_card import deviation_table
from gpt2_repro.files import write_whole
from gpt2_repro.report.read import Run, values
from gpt2_repro.run_record.time_breakdown import breakdown
from gpt2_repro.text import Cell, Table, count, duration, in_terminal


PERPLEXITY = re.compile("perplexity|nats_per_token")
SAMPLE_CHARACTERS = 300  # length limit of the sample in the terminal


def write_page(runs: Sequence[Run], output: Path, folder: Path | None = None) -> None:
    """Write a report as an HTML page to `output`, and its figures as PNG files to `folder`."""
    from gpt2_repro.report.plots import figures  # matplotlib takes a second to load

    labels = label_runs(runs)
    pictures = figures(runs, labels)
    if folder:
        for name, picture in pictures.items():
            write_whole(folder / f"{name}.png", picture)
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(
        loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["base64"] = lambda png: base64.b64encode(png).decode()
    tables = (progress, key_numbers, breakdown, deviation_table, sample_text)
    html = environment.get_template("page.html.j2").render(
        {function.__name__: function for function in tables},
        runs=list(zip(runs, labels, strict=True)),
        figures=pictures,
        not_comparable=not_comparable(runs),
        run_table=run_table(runs, labels),
        settings=setting_table(runs, labels),
        differences=recipe_differences(runs, labels),
        date=datetime.datetime.now().astimezone().isoformat(sep=" ", timespec="minutes"),
    )
    write_whole(output, html.encode())


def label_runs(runs: Sequence[Run]) -> list[str]:
    """Return a label for each run: the name of its directory, with its parent's name if needed."""
    names = [run.name for run in runs]
    return names if len(set(names)) == len(names) else ["/".join(run.path.resolve().parts[-2:]) for run in runs]


def summary(run: Run, page: Path) -> list[str]:
    """Return the summary of a run for the terminal. The last line names `page`."""
    numbers = [[Cell(label), Cell(text, "number"), Cell(note)] for label, text, note in key_numbers(run)]
    lines = [*filter(None, [run.status.reason]), *Table(["", "", ""], numbers).lines()[1:]]
    if run.comparison:
        rows = [row for row in run.comparison.rows if not PERPLEXITY.search(row.metric)]
        lines += ["", *dataclasses.replace(run.comparison, rows=rows or run.comparison.rows).table().lines(), ""]
    lines += run.missing().values()
    if run.samples:
        newest = run.samples[-1]
        text = in_terminal(f"{newest['prompt']}{sample_text(newest)}", SAMPLE_CHARACTERS)
        lines += textwrap.wrap(f"sample: {text}", 98, subsequent_indent="  ")
    lines.append(f"report: {page}")
    return [f"{run.name}: {run.status.state}, {progress(run)}", *(f"  {line}".rstrip() for line in lines)]


def progress(run: Run) -> str:
    """Return a run's progress, such as `step 200 of 300, 1.6 M tokens, 45 s left`."""
    step, steps, tokens = run.status.step, run.status.max_steps, run.status.tokens
    if step is None:
        return "no step logged"
    total, left = (steps or 0) * run.environment.plan.tokens_per_step, ""
    speeds = values(run.training, "tokens_per_second")
    if run.status.state == "running" and speeds and tokens is not None and total:
        left = f", {duration(max(0, total - tokens) / max(1, statistics.median(speeds)))} left"
    return f"step {step:,}{f' of {steps:,}' if steps else ''}, {count(tokens)} tokens{left}"


def key_numbers(run: Run) -> list[tuple[str, str, str]]:
    """Return label, text and note of the numbers at the top of a report. Unknown numbers are omitted."""
    validated = [row for row in run.validation if values([row], "eval_loss")] or [{}]
    last, best = validated[-1], min(validated, key=lambda row: row.get("eval_loss", math.inf))
    losses = "".join(f", {name} {loss:.3f}" for name, loss in run.reference_losses.items())
    at_last = f"at step {last.get('step')}{losses}"
    better = best.get("eval_loss") if best != last else None
    scores = ", ".join(f"{name} {score:.4f}" for name, score in run.reference_scores.items())
    sets, price, seconds = run.further_sets, run.environment.usd_per_hour or 0, run.status.seconds
    startup, (expected, note) = run.environment.startup, run.expected or (None, "")
    phases = ", ".join(f"{name} {part:.1f} s" for name, part in startup.items())
    numbers: list[tuple[str, Any, Callable[[Any], str], str]] = [
        ("validation loss (nats/token)", last.get("eval_loss"), "{:.3f}".format, at_last),
        ("best validation loss", better, "{:.3f}".format, f"at step {best.get('step')}"),
        ("expected last loss", expected, "{:.2f}".format, note),
        ("bits per byte", last.get("eval_bits_per_byte"), "{:.4f}".format, ""),
        *((f"loss of {name}", _last(run, f"eval_{name}_loss"), "{:.3f}".format, _bits(run, name)) for name in sets),
        ("HellaSwag", _last(run, "hellaswag_acc"), "{:.4f}".format, scores),
        ("non-finite training losses", len(run.non_finite_steps) or None, count, "steps"),
        ("parameters", run.environment.parameters or None, count, ""),
        ("tokens", run.status.tokens, count, ""),
        ("tokens/s", _median(run, "tokens_per_second"), "{:,.0f}".format, "median"),
        ("MFU", _median(run, "mfu"), "{:.1%}".format, "median"),
        ("padding", _median(run, "padding"), "{:.1%}".format, "median"),
        ("time", seconds, duration, ""),
        ("last start-up", sum(startup.values()) or None, duration, phases),
        ("cost", (seconds or 0) / 3600 * price or None, "${:,.2f}".format, f"at ${price:,.2f} an hour"),
    ]
    return [(label, form(value), note) for label, value, form, note in numbers if value is not None]


def _bits(run: Run, name: str) -> str:
    bits = _last(run, f"eval_{name}_bits_per_byte")
    return "" if bits is None else f"{bits:.4f} bits per byte"


def _last(run: Run, key: str) -> float | None:
    return next(reversed(values(run.validation, key)), None)


def _median(run: Run, key: str) -> float | None:
    logged = values(run.training, key)
    return statistics.median(logged) if logged else None


def not_comparable(runs: Sequence[Run]) -> list[str]:
    """Return the reasons why the numbers of the runs cannot be compared."""
    data = [run.environment.data for run in runs]
    tokenizers = {one.get("tokenizer_sha256") for one in data} - {None}
    sets = {one.get("sha256", {}).get("validation") for one in data if len(tokenizers) < 2}
    tokens, items = ({_last(run, key) for run in runs} for key in ("eval_tokens", "hellaswag_items"))
    compared = {
        "The runs use different tokenizers. Compare only their bits per byte (evaluate.sh with all runs).": tokenizers,
        "The runs use different validation sets. Task scores can be compared, but losses cannot.": sets,
        "The runs were validated on different numbers of tokens. Their losses cannot be compared.": tokens,
        "The runs have different numbers of steps.": {run.status.step for run in runs},
        "The runs were scored on different HellaSwag items. Their accuracies cannot be compared.": items,
    }
    return [reason for reason, values in compared.items() if len(values - {None}) > 1]


def sample_text(sample: dict[str, Any]) -> str:
    """Return the text generated after the prompt, without several blank lines in a row."""
    return re.sub(r"\n(?:[ \t\r]*\n)+", "\n\n", sample["text"].removeprefix(sample["prompt"])).rstrip()


def run_table(runs: Sequence[Run], labels: Sequence[str]) -> Table:
    """Return a table of the key numbers of several runs, the run with the lowest loss first."""
    numbers = [{label: text for label, text, _ in key_numbers(run)} | _scores(run) for run in runs]
    columns = list(dict.fromkeys(name for row in numbers for name in row))
    entries = zip(runs, labels, numbers, strict=True)
    rows = [
        [Cell(label), Cell(f"{run.status.state}, {progress(run)}")]
        + [Cell(row.get(name, "–"), "number") for name in columns]
        for run, label, row in sorted(entries, key=lambda entry: _last(entry[0], "eval_loss") or math.inf)
    ]
    return Table(["run", "state", *columns], rows)


def _scores(run: Run) -> dict[str, str]:
    """Return the scores of a run's evaluation, without perplexities and means over seeds."""
    if not run.comparison or run.comparison.limit is not None:
        return {}
    column = run.comparison.models[0].name
    rows = [row for row in run.comparison.rows if not PERPLEXITY.search(row.metric)]
    scored = [(row, score) for row in rows if (score := row.values.get(column)) and len(score.seeds) < 2]
    return {f"{row.task} {row.metric}": f"{score.value:.4f}" for row, score in scored if score.value is not None}


def setting_table(runs: Sequence[Run], labels: Sequence[str]) -> Table:
    """Return the mean loss of each setting, and its difference from the setting with the lowest mean.

    Runs have the same setting if they differ only in the seed. Of runs with equal seeds, the first is counted. The
    seeds are the unit: the interval is Tukey's for all pairs of settings, with the standard deviation of all settings
    together, because the lowest mean of several settings is partly luck. For two settings it is Student's. All runs
    validate on the same rows.
    """
    from scipy import stats

    groups: dict[str, dict[object, tuple[float, str]]] = {}
    for run, label in zip(runs, labels, strict=True):
        average = _last(run, "eval_EMA_loss")  # of the weights in final/
        if (loss := _last(run, "eval_loss") if average is None else average) is not None:
            groups.setdefault(run.setting, {}).setdefault(run.seeds, (loss, label))
    settings: list[Any] = [tuple(zip(*group.values(), strict=True)) for group in groups.values()]  # losses, labels
    settings.sort(key=lambda setting: statistics.fmean(setting[0]))
    freedom = sum(len(losses) - 1 for losses, _ in settings)
    squares = sum((loss - statistics.fmean(losses)) ** 2 for losses, _ in settings for loss in losses)
    rows = []
    for losses, names in settings if len(runs) > 1 else ():
        mean, best = statistics.fmean(losses), settings[0][0]
        difference = mean - statistics.fmean(best)
        compared = [f"{difference:+.4f}", "one seed each: unknown"]
        if losses is best:
            compared = ["–", ""]
        elif freedom:
            error = math.sqrt(squares / freedom * (1 / len(losses) + 1 / len(best)) / 2)
            half = error * stats.studentized_range.ppf(0.95, len(settings), freedom)
            compared = [f"{difference:+.4f} ± {half:.4f}", "higher" if difference > half else "within the seeds"]
        end = os.path.commonprefix([name[::-1] for name in names])[::-1]
        name = names[0] if len(names) == 1 else f"{os.path.commonprefix(names)}*{end}"
        deviation = f" ± {statistics.stdev(losses):.4f}" if len(names) > 1 else ""
        rows.append([Cell(text) for text in (name, str(len(names)), f"{mean:.4f}{deviation}", *compared)])
    return Table(["setting", "seeds", "validation loss", "difference, 95 % interval", "verdict"], rows)


def recipe_differences(runs: Sequence[Run], labels: Sequence[str]) -> Table:
    """Return a table of the recipe fields whose values differ between the runs."""
    recipes = [
        {f"{section}.{key}": str(value) for section, keys in run.recipe.items() for key, value in keys.items()}
        for run in runs
    ]
    fields = dict.fromkeys(field for recipe in recipes for field in recipe)
    rows = [[field, *(recipe.get(field, "–") for recipe in recipes)] for field in fields]
    return Table(["field", *labels], [[Cell(text) for text in row] for row in rows if len(set(row[1:])) > 1])

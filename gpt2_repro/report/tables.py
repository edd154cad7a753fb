"""Key numbers and tables of a report, formatted for the page and the terminal."""

import dataclasses
import json
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from gpt2_repro.evaluation import comparison
from gpt2_repro.evaluation.references import HELLASWAG_ITEMS, Baseline, baseline_of, published_loss
from gpt2_repro.report.read import Row, Run, mapping, reading, values
from gpt2_repro.run_record.layout import COMPARISON, DIAGNOSIS
from gpt2_repro.run_record.time_breakdown import breakdown
from gpt2_repro.text import Cell, Table, count, duration


OWN_TEXT = "validation text"  # label of the main validation set in a diagnosis


class KeyNumber(NamedTuple):
    """A number as text, with a label, and notes such as reference values."""

    label: str
    text: str
    notes: Sequence[Cell] = ()


def progress(run: Run) -> str:
    """Return a run's progress, such as `step 200 of 300, 1.6 M tokens, 45 s left`."""
    step, tokens = run.status.step, run.status.tokens
    if step is None:
        return "no step logged"
    of = f" of {run.status.max_steps:,}" if run.status.max_steps else ""
    speed, left = _median(run, "tokens_per_second"), ""
    if run.status.state == "running" and speed and tokens is not None and run.total_tokens:
        left = f", {duration(max(0, run.total_tokens - tokens) / speed)} left"
    return f"step {step:,}{of}, {count(tokens)} tokens{left}"


def key_numbers(run: Run) -> list[KeyNumber]:
    """Return the numbers shown at the top of a report. Unknown numbers are omitted."""
    last = run.validated[-1] if run.validated else {}
    best = min(run.validated, key=lambda row: row["eval_loss"], default={})
    further = {name: values(run.validation, f"eval_{name}_loss") for name in run.further_sets}
    hellaswag = run.hellaswag[-1] if run.hellaswag else {}
    compared = ", ".join(f"{name} {value:.4f}" for name, value in hellaswag_lines(run).items())
    items = f"of {count(hellaswag.get('hellaswag_items'))} items"
    seconds, price = run.status.seconds, run.environment.usd_per_hour or 0.0
    usd = seconds / 3600 * price if seconds is not None and price else None
    planned = f"of {count(run.total_tokens)} planned" if run.total_tokens not in (0, run.status.tokens) else ""
    numbers: list[tuple[str, Any, Callable[[Any], str], str]] = [
        ("validation loss (nats/token)", last.get("eval_loss"), "{:.3f}".format, _at_step(last)),
        ("best validation loss", None if best == last else best["eval_loss"], "{:.3f}".format, _at_step(best)),
        *((f"loss of {name}", next(reversed(found), None), "{:.3f}".format, "") for name, found in further.items()),
        ("HellaSwag", hellaswag.get("hellaswag_acc"), "{:.4f}".format, compared or items),
        ("parameters", run.environment.parameters or None, count, ""),
        ("tokens", run.status.tokens, count, planned),
        ("tokens/s (median)", _median(run, "tokens_per_second"), "{:,.0f}".format, ""),
        ("MFU (median)", _median(run, "mfu"), "{:.1%}".format, "of the peak FLOP/s"),
        ("padding (median)", _median(run, "padding"), "{:.1%}".format, "of the computed positions"),
        ("time", seconds, duration, ""),
        ("cost", usd, "${:,.2f}".format, f"at ${price:,.2f} an hour"),
    ]
    known = [KeyNumber(label, form(value), [Cell(note)]) for label, value, form, note in numbers if value is not None]
    if last:
        known[0] = known[0]._replace(notes=[*known[0].notes, *_against(last["eval_loss"], run.reference_losses)])
    return known


def _at_step(validation: Row) -> str:
    return f"at step {validation['step']:,}" if validation else ""


def _against(loss: float, references: Mapping[str, float]) -> list[Cell]:
    """Compare `loss` with each reference. Return one text per reference.

    An example of a text is `bigram 4.601: better by 0.478`.
    """
    kinds = {name: "worse" if loss > reference else "better" for name, reference in references.items()}
    return [
        Cell(f"{name} {references[name]:.3f}: {kind} by {abs(loss - references[name]):.3f}", kind)
        for name, kind in kinds.items()
    ]


def _median(run: Run, key: str) -> float | None:
    found = values(run.training, key)
    return statistics.median(found) if found else None


def baseline_losses(run: Run) -> dict[str, float]:
    """Return the loss of a baseline model on the run's validation set, by model name.

    The loss is from diagnosis.json, if this file compares the run with a baseline on this set. Otherwise, the baseline
    is the GPT-2 model whose size is closest to the run's size, and its published loss on this set is returned. If no
    loss was published, or if the run was not validated, the result is empty.
    """
    losses = run.validated
    if not losses:
        return {}
    for domain in run.diagnosis.get("domains", []):
        if domain["label"] == OWN_TEXT:
            # The difference (run minus baseline) was measured on the same tokens.
            return {"baseline": losses[-1]["eval_loss"] - domain["difference"]["value"]}
    baseline = _baseline(run)
    request = mapping(run.environment.data.get("request"))
    loss = published_loss(baseline, request, losses[-1].get("eval_tokens"))
    return {} if loss is None else {baseline.name: loss}


def _baseline(run: Run) -> Baseline:
    """Return the GPT-2 model whose size is nearest to the run's active parameters."""
    return baseline_of(run.environment.active_parameters or run.environment.parameters)


def hellaswag_lines(run: Run) -> dict[str, float]:
    """Return the HellaSwag accuracies of a GPT-2 and a GPT-3 model.

    These are the models whose size is closest to the run's size. The result is empty unless the run
    scored the complete HellaSwag validation split.
    """
    baseline = _baseline(run)
    whole = run.hellaswag and run.hellaswag[-1].get("hellaswag_items") == HELLASWAG_ITEMS
    of_gpt3 = baseline.name.replace("GPT-2", "GPT-3")
    return {baseline.name: baseline.hellaswag, of_gpt3: baseline.gpt3_hellaswag} if whole else {}


def why_not_comparable(runs: Sequence[Run]) -> list[str]:
    """Return the reasons why the numbers of the runs cannot be compared."""
    data = [run.environment.data for run in runs]
    reasons = []
    if len({one["tokenizer_sha256"] for one in data if one.get("tokenizer_sha256")}) > 1:
        reasons.append(
            "The runs use different tokenizers. Run evaluate.sh with all runs and compare only their bits per byte."
        )
    elif len({digest for one in data if (digest := mapping(one.get("sha256")).get("validation"))}) > 1:
        reasons.append("The runs use different validation sets. Task scores can be compared, but losses cannot.")
    if len({items for run in runs for items in values(run.hellaswag[-1:], "hellaswag_items")}) > 1:
        reasons.append("The runs were scored on different HellaSwag items. Their accuracies cannot be compared.")
    return reasons


def count_table(manifest: Mapping[str, Any]) -> Table:
    """Return a table of the numbers of documents, tokens and rows in each split."""
    splits = {name: mapping(counts) for name, counts in mapping(manifest.get("counts")).items()}
    return _records("split", {name: counts for name, counts in splits.items() if counts})


def evaluation_table(run: Run, *, brief: bool = False) -> Table:
    """Return the table of evaluation scores.

    Raises UserError if comparison.json is damaged.

    Args:
        brief: omit perplexities and nats per token, unless the table has no other metrics.
    """
    with reading(run.path / COMPARISON):
        if not run.comparison:
            return Table([], [])
        others = [row for row in run.comparison.rows if not re.search("perplexity|nats_per_token", row.metric)]
        rows = brief and others or run.comparison.rows
        return dataclasses.replace(run.comparison, rows=rows).table()


def sample_text(sample: Row) -> str:
    """Return the text generated after the prompt.

    Several blank lines in a row are reduced to one.
    """
    return re.sub(r"\n(?:[ \t\r]*\n)+", "\n\n", sample["text"].removeprefix(sample["prompt"])).rstrip()


def diagnosis_tables(run: Run) -> dict[str, Table]:
    """Return the tables of diagnosis.json as a dict from title to table.

    Raises UserError if diagnosis.json is damaged.
    """
    with reading(run.path / DIAGNOSIS):
        return comparison.diagnosis_tables(run.diagnosis)


def validation_table(run: Run) -> Table:
    """Return a table of all validations with their losses and scores."""
    units = {key: f"{key} (nats/token)" for row in run.validation for key in row if key.endswith("loss")}
    rows = {row["step"]: {units.get(key, key): row[key] for key in row} for row in run.validation}
    return _records("step", rows, without=("step", "time"))


def _records(name: str, records: Mapping[Any, Row], without: Sequence[str] = ()) -> Table:
    """Return a table with one row for each entry of `records`.

    The first column contains the keys of `records`. Each other column contains one field of the entries.

    Args:
        name: header of the first column.
        without: fields that get no column.
    """
    columns = [key for key in dict.fromkeys(key for row in records.values() for key in row) if key not in without]
    rows = [[_plain(label), *(_plain(row.get(key)) for key in columns)] for label, row in records.items()]
    return Table([name, *columns], rows)


def time_table(run: Run) -> Table:
    """Return a table of the time, share and cost (if known) of each part of the run."""
    price = run.environment.usd_per_hour
    rows = breakdown(run.status.time_breakdown, usd_per_hour=price)
    headers = ["activity", "time", "share", *(["cost"] if price else [])]
    return Table(headers, [[Cell(row[0]), *(Cell(text, "number") for text in row[1:])] for row in rows])


def deviation_table(run: Run) -> Table:
    """Return a table of the training settings that differ from recipes/gpt2_124m.yaml."""
    deviations = run.environment.deviations or []
    rows = [[Cell(its.get(key, "–")) for key in ("field", "run", "recipe")] for its in deviations]
    return Table(["field", "this run", "gpt2_124m"], rows)


def run_table(runs: Sequence[Run], labels: Sequence[str]) -> Table:
    """Return a table of the key numbers of several runs, one run per row."""
    texts = [
        {"last validation": _at_step(run.validated[-1]) if run.validated else "–"}
        | {number.label: number.text for number in key_numbers(run)}
        for run in runs
    ]
    columns = list(dict.fromkeys(name for row in texts for name in row))
    rows = [
        [Cell(label), Cell(str(run.status.state)), *(Cell(row.get(name, "–"), "number") for name in columns)]
        for label, run, row in zip(labels, runs, texts, strict=True)
    ]
    return Table(["run", "state", *columns], rows)


def recipe_differences(runs: Sequence[Run], labels: Sequence[str]) -> Table:
    """Return a table of the recipe fields whose values differ between the runs."""
    recipes = [{key: json.dumps(value, default=str) for key, value in flatten(run.recipe).items()} for run in runs]
    keys = dict.fromkeys(key for recipe in recipes for key in recipe)
    rows = [[key, *(recipe.get(key, "–") for recipe in recipes)] for key in keys]
    return Table(["field", *labels], [[Cell(text) for text in row] for row in rows if len(set(row[1:])) > 1])


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a nested mapping as a flat mapping with keys such as `data.source`."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def entries(tree: Row, without: Sequence[str] = ()) -> dict[str, str]:
    """Return a nested mapping as a flat mapping with the values as text.

    The keys have the form `data.source`. Values of None are omitted.

    Args:
        without: top-level keys to omit.
    """
    flat = flatten({key: value for key, value in tree.items() if key not in without})
    return {key: _text(value) for key, value in flat.items() if value is not None}


def _text(value: object) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"{value:.4g}" if isinstance(value, float) else f"{value:,}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _plain(value: object) -> Cell:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return Cell(f"{value:,}" if isinstance(value, int) else f"{value:.4f}", "number")
    return Cell("–" if value is None else str(value))

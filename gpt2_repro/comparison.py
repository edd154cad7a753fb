"""Render comparison.json and the tables of diagnosis.json, for the screen, Markdown, the report and the model card."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


# Two models are called equal if they differ by less than this: in points of 1 for accuracies, otherwise as a fraction of
# the baseline's value. All perplexities of a text are the same number in other units: 5 % of a word's perplexity is
# 1.4 % of bits per byte.
MARGINS = {
    **dict.fromkeys(("acc", "acc_norm", "completion"), 0.02),
    **dict.fromkeys(("perplexity", "word_perplexity"), 0.05),
    **dict.fromkeys(("bits_per_byte", "nats_per_token"), 0.014),
    "byte_perplexity": 0.01,
}
KINDS = {"better": "better", "worse": "worse", "matches": "even", "inconclusive": "even"}
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


def comparison_table(
    comparison: Mapping[str, Any], names: Mapping[str, str] | None = None
) -> tuple[list[str], list[list[Cell]]]:
    """Return the headers and rows of a comparison.json.

    Args:
        names: the models to show, with their headings. None shows all by name.
    """
    names = names or {model["name"]: model["name"] for model in comparison["models"]}
    if len(names) > MOST_COLUMNS:
        return _trend(comparison)
    baseline = comparison.get("baseline")
    compared = [name for name in names if baseline in names and name != baseline]
    headers = ["task", "metric", *names.values()]
    headers += [f"{names[name]} − {baseline}" if len(compared) > 1 else "difference" for name in compared]
    rows = []
    for row in comparison["rows"]:
        cells = [Cell(row["task"]), Cell(f"{row['metric']}{_arrow(row)}")]
        cells += [Cell(_with_stderr(row, name), "number") for name in names]
        rows.append([*cells, *(_difference(row, name) for name in compared)])
    return headers, rows


def _trend(comparison: Mapping[str, Any]) -> tuple[list[str], list[list[Cell]]]:
    """One row per model, for many checkpoints of a run by the tokens they were trained on."""
    columns = [f"{row['task']} {row['metric']}{_arrow(row)}" for row in comparison["rows"]]
    rows = []
    for model in comparison["models"]:
        name, tokens = model["name"], model["tokens_trained"]
        cells = [Cell(name), Cell("-" if tokens is None else f"{tokens:,}", "number")]
        for row in comparison["rows"]:
            verdict = row["difference"].get(name, {}).get("verdict")
            shown = _with_stderr(row, name) + (f" ({verdict})" if verdict else "")
            cells.append(Cell(shown, KINDS.get(verdict, "number")))
        rows.append(cells)
    return ["model", "tokens trained", *columns], rows


def markdown_table(headers: Sequence[str], rows: Sequence[Sequence[str]], *, numbers_from: int = 1) -> str:
    """Return a Markdown table whose columns are right-aligned from column `numbers_from` on."""
    rule = ["---:" if column >= numbers_from else "---" for column in range(len(headers))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (headers, rule, *rows))


def diagnosis_tables(diagnosis: Mapping[str, Any]) -> dict[str, tuple[list[str], list[list[Cell]]]]:
    """Return the headers and rows of each table of a diagnosis.json by its title."""
    headers = ["", "tokens", *(model["name"] for model in diagnosis["models"]), "difference"]
    tables = {DIAGNOSIS_TABLES[name]: diagnosis.get(name) for name in DIAGNOSIS_TABLES}
    return {title: (headers, [_bucket(bucket) for bucket in buckets]) for title, buckets in tables.items() if buckets}


def _bucket(bucket: Mapping[str, Any]) -> list[Cell]:
    difference, error = bucket["difference"]["value"], bucket["difference"]["stderr"]
    shown = f"{difference:+.3f}" + ("" if error is None else f" ± {error:.3f}")
    texts = [f"{bucket['tokens']:,}", f"{bucket['ours']:.3f}", f"{bucket['theirs']:.3f}", shown]
    return [Cell(bucket["label"]), *(Cell(text.replace("-", "−"), "number") for text in texts)]


def comparison_markdown(comparison: Mapping[str, Any], names: Mapping[str, str] | None = None) -> str:
    """Return the table of a comparison.json as Markdown. Args: see `comparison_table`."""
    headers, rows = comparison_table(comparison, names)
    texts = [[cell.text for cell in row] for row in rows]
    return markdown_table(headers, texts, numbers_from=1 if headers[0] == "model" else 2)


def to_markdown(comparison: Mapping[str, Any]) -> str:
    """Return the table with its warnings, and notes on how to trust and repeat it."""
    parts = [f"**{warning}**" for warning in comparison["warnings"]]
    table = comparison_markdown(comparison)
    if comparison["limit"] is not None:
        warning = (
            f"**A smoke test, not benchmark numbers: --limit {comparison['limit']} scored only the first documents of "
            "each task, and nothing is judged.**"
        )
        parts += [warning, table, warning]
    else:
        parts.append(table)
    return "\n\n".join([*parts, "\n".join(f"- {note}" for note in _notes(comparison))]) + "\n"


def _notes(comparison: Mapping[str, Any]) -> list[str]:
    tasks = [
        f"{task}: "
        + (details["data"] if details["version"] is None else f"version {details['version']}, ")
        + (f"{details['documents']} documents of {details['data']}" if details["documents"] else "")
        for task, details in comparison["task_details"].items()
    ]
    versions = ", ".join(f"{name} {version}" for name, version in comparison["versions"].items())
    return [
        f"Window {comparison['max_length']:,} tokens, {comparison['dtype']}, batches of {comparison['batch_size']}, seed "
        f"{comparison['seed']}, {comparison['device']} for every model; ± one standard error",
        *(_describe(model) for model in comparison["models"]),
        *tasks,
        *_conventions(comparison),
        f"{versions}; {comparison['date']}: `{comparison['command']}`",
        "One seed is one checkpoint, not a recipe: runs that differ only in their seed differ too",
    ]


def _describe(model: Mapping[str, Any]) -> str:
    if model["revision"] is None:
        return f"{model['name']}: not measured here, published by {'; '.join(model['published_by'])}"
    tokens = model["tokens_trained"]
    words = [
        f"{model['parameters']:,} parameters",
        "tokens trained not known" if tokens is None else f"{tokens:,} tokens trained",
        *([] if model["source"] == model["name"] else [f"from {model['source']}"]),
        f"revision {model['revision'][:12]}",
    ]
    return f"{model['name']}: {', '.join(words)}"


def _conventions(comparison: Mapping[str, Any]) -> list[str]:
    lines = []
    if any(its["verdict"] for row in comparison["rows"] for its in row["difference"].values()):
        shown = {row["metric"] for row in comparison["rows"]}
        margins = ", ".join(
            f"{metric} {margin:g}" if "acc" in metric or metric == "completion" else f"{metric} {margin:.1%}"
            for metric, margin in MARGINS.items()
            if metric in shown
        )
        lines.append(
            "Differences have paired standard errors, on the same documents. matches: the 95 % interval lies within the "
            f"margin ({margins}); better, worse: the interval excludes 0; inconclusive: neither"
        )
    if "hellaswag" in comparison["tasks"]:
        lines.append(
            "HellaSwag is three numbers: acc by the sum of an ending's log-probabilities and acc_norm per character, both on "
            "lm-eval's rewritten text; completion per token on the original text, as llm.c and build-nanogpt score it"
        )
    return lines


def _arrow(row: Mapping[str, Any]) -> str:
    return {True: " ↑", False: " ↓", None: ""}[row["higher_is_better"]]


def _with_stderr(row: Mapping[str, Any], name: str) -> str:
    entry = row["values"].get(name) or {}
    if entry.get("value") is None:
        return "-"
    shown = _number(entry["value"], row)
    return shown if entry["stderr"] is None else f"{shown} ± {_number(entry['stderr'], row)}"


def _difference(row: Mapping[str, Any], name: str) -> Cell:
    difference = row["difference"].get(name)
    if difference is None:
        return Cell("-")
    shown = _number(difference["value"], row, sign="+")
    if difference["stderr"] is not None:
        shown += f" ± {_number(difference['stderr'], row)}"
    verdict = difference["verdict"]
    return Cell(f"{shown} {verdict}", KINDS[verdict]) if verdict else Cell(shown)


def _number(value: float, row: Mapping[str, Any], *, sign: str = "") -> str:
    """Format a number with the decimals that fit the largest value of its row."""
    scale = max((abs(entry["value"]) for entry in row["values"].values() if entry["value"] is not None), default=0)
    decimals = 4 if scale < 10 else 2 if scale < 10_000 else 0
    return f"{value:{sign},.{decimals}f}".replace("-", "−")

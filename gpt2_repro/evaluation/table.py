"""The comparison as Markdown."""

from collections.abc import Mapping, Sequence
from typing import Any

from gpt2_repro.evaluation.statistics import MARGINS


def to_markdown(comparison: Mapping[str, Any]) -> str:
    """The table of a comparison.json, and below it what a reader needs to trust it or to run it again."""
    models = comparison["models"]
    lines = aligned(_trend(comparison) if len(models) > 4 else _table(comparison))
    if comparison["limit"] is not None:
        warning = (
            f"**A smoke test, not benchmark numbers: --limit {comparison['limit']} scored only the first documents of "
            "each task, and nothing is judged.**"
        )
        lines = [warning, "", *lines, "", warning]
    warnings = [line for warning in comparison["warnings"] for line in (f"**{warning}**", "")]
    return "\n".join([*warnings, *lines, "", *_notes(comparison)]) + "\n"


def _table(comparison: Mapping[str, Any]) -> list[list[str]]:
    """One metric a row, one model a column."""
    baseline = comparison["baseline"]
    names = [model["name"] for model in comparison["models"]]
    compared = [name for name in names if baseline is not None and name != baseline]
    table = [["task", "metric", *names, *(f"{name} − {baseline}" for name in compared)]]
    table.append(["---", "---", *("---:" for _ in table[0][2:])])
    for row in comparison["rows"]:
        scale = _scale(row)
        values = [_with_stderr(row["values"][name], scale) for name in names]
        differences = [_judged(row["difference"].get(name), scale) for name in compared]
        table.append([row["task"], f"{row['metric']}{_arrow(row)}", *values, *differences])
    return table


def _trend(comparison: Mapping[str, Any]) -> list[list[str]]:
    """One model a row, one metric a column: many checkpoints of a run, by the tokens that they have seen."""
    rows = comparison["rows"]
    table = [["model", "tokens trained", *(f"{row['task']} {row['metric']}{_arrow(row)}" for row in rows)]]
    table.append(["---", *("---:" for _ in table[0][1:])])
    for model in comparison["models"]:
        tokens = model["tokens_trained"]
        cells = []
        for row in rows:
            verdict = (row["difference"].get(model["name"]) or {}).get("verdict")
            shown = _with_stderr(row["values"][model["name"]], _scale(row))
            cells.append(f"{shown} ({verdict})" if verdict else shown)
        table.append([model["name"], "-" if tokens is None else f"{tokens:,}", *cells])
    return table


def aligned(table: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table of cells."""
    return [f"| {' | '.join(cells)} |" for cells in table]


def _arrow(row: Mapping[str, Any]) -> str:
    return {True: " ↑", False: " ↓", None: ""}[row["higher_is_better"]]


def _scale(row: Mapping[str, Any]) -> float:
    return max((abs(entry["value"]) for entry in row["values"].values() if entry["value"] is not None), default=0)


def _notes(comparison: Mapping[str, Any]) -> list[str]:
    tasks = [
        f"{task}: "
        + (details["data"] if details["version"] is None else f"version {details['version']}, ")
        + (f"{details['documents']} documents of {details['data']}" if details["documents"] else "")
        for task, details in comparison["task_details"].items()
    ]
    versions = ", ".join(f"{name} {version}" for name, version in comparison["versions"].items())
    lines = [
        f"Window {comparison['max_length']:,} tokens, {comparison['dtype']}, batches of {comparison['batch_size']}, seed "
        f"{comparison['seed']}, {comparison['device']} for every model; ± one standard error",
        *(_describe(model) for model in comparison["models"]),
        *tasks,
        *_conventions(comparison),
        f"{versions}; {comparison['date']}: `{comparison['command']}`",
        "One seed is one checkpoint, not a recipe: runs that differ only in their seed differ too",
    ]
    return [f"- {line}" for line in lines]


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
    verdicts = [its["verdict"] for row in comparison["rows"] for its in row["difference"].values()]
    if any(verdicts):
        shown = {row["metric"] for row in comparison["rows"]} & MARGINS.keys()
        margins = ", ".join(
            f"{metric} {MARGINS[metric]:g}"
            if "acc" in metric or metric == "completion"
            else f"{metric} {MARGINS[metric]:.1%}"
            for metric in MARGINS
            if metric in shown
        )
        lines.append(
            "Differences have paired standard errors, of the same documents; matches: the 95 % interval lies "
            f"within the margin ({margins}); else better and worse: it leaves out 0; inconclusive: neither"
        )
    if "hellaswag" in comparison["tasks"]:
        lines.append(
            "HellaSwag is three numbers: acc by the sum of an ending's log-probabilities, acc_norm per character, both of "
            "lm-eval on its rewritten text; completion per token on the text as it stands, llm.c's and build-nanogpt's"
        )
    return lines


def _judged(difference: Mapping[str, Any] | None, scale: float) -> str:
    if difference is None:
        return "-"
    shown = _number(difference["value"], scale, sign="+")
    if difference["stderr"] is not None:
        shown += f" ± {_number(difference['stderr'], scale)}"
    return f"{shown} {difference['verdict']}" if difference["verdict"] else shown


def _with_stderr(entry: Mapping[str, float | None], scale: float) -> str:
    shown = _number(entry["value"], scale)
    return (
        shown if entry["value"] is None or entry["stderr"] is None else f"{shown} ± {_number(entry['stderr'], scale)}"
    )


def _number(value: float | None, scale: float, *, sign: str = "") -> str:
    """A number with the decimals that fit the largest value of its row."""
    if value is None:
        return "-"
    decimals = 4 if scale < 10 else 2 if scale < 10_000 else 0
    return f"{value:{sign},.{decimals}f}".replace("-", "−")

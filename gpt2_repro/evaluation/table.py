"""The comparison as Markdown."""

from collections.abc import Mapping
from typing import Any


def to_markdown(comparison: Mapping[str, Any]) -> str:
    """The table of a comparison.json, and below it what a reader needs to trust it or to run it again."""
    baseline = comparison["baseline"]
    names = [model["name"] for model in comparison["models"]]
    compared = [name for name in names if baseline is not None and name != baseline]
    header = ["task", "metric", *names, *(f"{name} − {baseline}" for name in compared)]
    table = [header, ["---", "---", *("---:" for _ in header[2:])]]
    for row in comparison["rows"]:
        arrow = {True: " ↑", False: " ↓", None: ""}[row["higher_is_better"]]
        scale = max((abs(entry["value"]) for entry in row["values"].values() if entry["value"] is not None), default=0)
        values = [_with_stderr(row["values"][name], scale) for name in names]
        differences = [_number(row["difference"].get(name), scale, sign="+") for name in compared]
        table.append([row["task"], f"{row['metric']}{arrow}", *values, *differences])
    lines = [f"| {' | '.join(cells)} |" for cells in table]
    if comparison["limit"] is not None:
        warning = (
            f"**Not benchmark numbers: --limit {comparison['limit']} scored only the first documents of each task.**"
        )
        lines = [warning, "", *lines, "", warning]
    return "\n".join([*lines, "", *_notes(comparison)]) + "\n"


def _notes(comparison: Mapping[str, Any]) -> list[str]:
    models = [
        f"{model['name']}: {model['parameters']:,} parameters, "
        + (
            "tokens trained not known"
            if model["tokens_trained"] is None
            else f"{model['tokens_trained']:,} tokens trained"
        )
        + ("" if model["source"] == model["name"] else f", from {model['source']}")
        for model in comparison["models"]
    ]
    tasks = [
        f"{task}: version {details['version']}, {details['documents']} documents of {details['data']}"
        for task, details in comparison["task_details"].items()
    ]
    versions = ", ".join(f"{name} {version}" for name, version in comparison["versions"].items())
    return [
        f"- Window {comparison['max_length']:,} tokens, {comparison['dtype']} for every model; ± one standard error",
        *(f"- {line}" for line in models + tasks),
        f"- {versions}; {comparison['date']}: `{comparison['command']}`",
        "- One seed is one checkpoint, not a recipe: runs that differ only in their seed differ too",
    ]


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

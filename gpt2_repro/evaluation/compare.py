"""The table that compares models: pure functions from their scores to one dictionary."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from gpt2_repro.evaluation.scores import Metric, TaskScores
from gpt2_repro.evaluation.statistics import Difference, paired


@dataclasses.dataclass(frozen=True)
class ComparedModel:
    """A column of the table."""

    name: str
    source: str  # a folder, a Hub id or "untrained"
    parameters: int | None
    tokens_trained: int | None  # None where unknown
    revision: str | None = None  # None of numbers that are published and were not measured
    published_by: list[str] = dataclasses.field(default_factory=list)


def compare(
    scores: Mapping[str, Sequence[TaskScores]],
    baseline: str | None,
    *,
    models: Sequence[ComparedModel],
    limit: int | None,
    warnings: Sequence[str] = (),
    **settings: Any,
) -> dict[str, Any]:
    """What comparison.json holds.

    `difference` is a model's value minus the baseline's, paired where both were scored here on the same documents.
    `higher_is_better` is None where the harness does not say, as for some groups of tasks.

    Args:
        scores: by the model's name.
        baseline: a name among them, or None.
        limit: documents of each task; where it is given nothing is judged.
        settings: what else was the same for all models: window, date, command, versions.
    """
    by_model = {name: {task.task: task for task in tasks} for name, tasks in scores.items()}
    first = next(iter(scores.values()))
    rows = [
        _row(task.task, metric, by_model, baseline, judged=limit is None) for task in first for metric in task.metrics
    ]
    return {
        **settings,
        "tasks": [task.task for task in first],
        "task_details": {
            task.task: {"version": task.version, "documents": task.num_documents, "data": task.data} for task in first
        },
        "limit": limit,
        "dtype": "float32",
        "baseline": baseline,
        "models": [dataclasses.asdict(model) for model in models],
        "warnings": list(warnings),
        "rows": rows,
    }


def _row(
    task: str, metric: Metric, by_model: Mapping[str, Mapping[str, TaskScores]], baseline: str | None, *, judged: bool
) -> dict[str, Any]:
    found = {name: _find(tasks.get(task), metric.name) for name, tasks in by_model.items()}
    values = {name: {"value": its and its.value, "stderr": its and its.stderr} for name, (_, its) in found.items()}
    differences = {}
    for name in found if baseline is not None else ():
        difference = _difference(found[name], found[baseline]) if baseline else None
        if name != baseline and difference is not None:
            verdict = difference.verdict if judged else None
            differences[name] = dataclasses.asdict(dataclasses.replace(difference, verdict=verdict))
    return {
        "task": task,
        "metric": metric.name,
        "higher_is_better": metric.higher_is_better,
        "values": values,
        "difference": differences,
    }


def _find(task: TaskScores | None, metric: str) -> tuple[TaskScores | None, Metric | None]:
    return task, next((its for its in task.metrics if its.name == metric), None) if task else None


def _difference(
    ours: tuple[TaskScores | None, Metric | None], theirs: tuple[TaskScores | None, Metric | None]
) -> Difference | None:
    (our_task, our), (their_task, their) = ours, theirs
    if our is None or their is None or our.value is None or their.value is None:
        return None
    same = our_task is not None and their_task is not None and our_task.documents == their_task.documents
    if not same or our.aggregation is None or len(our.values) != len(their.values) or len(our.values) < 2:
        return Difference(our.value - their.value)
    mine, base = our.array(), their.array()
    if mine.ndim > 1 and not (mine[:, 1] == base[:, 1]).all():
        return Difference(our.value - their.value)  # per token, of two tokenizers
    return paired(our.name, our.aggregation, mine, base, higher_is_better=our.higher_is_better)

"""Compare the scores of several models: a pure function from their scores to a Comparison."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from gpt2_repro.comparison import ComparedModel, Comparison, ComparisonRow, Difference, Score, TaskDetails
from gpt2_repro.evaluation.published import find_deviations
from gpt2_repro.evaluation.scores import EvaluationSettings, Metric, ScoredModel
from gpt2_repro.evaluation.statistics import paired


Found = tuple[list[str], Metric]  # hashes of the documents, and the metric


def compare(
    scored: Sequence[ScoredModel],
    baseline: ComparedModel | None,
    settings: EvaluationSettings,
    metadata: Mapping[str, Any],
) -> Comparison:
    """Return the scores of all models, and their differences to the baseline.

    A difference is paired if both models were scored here on the same documents. With a limit nothing is judged.

    Args:
        scored: models with their scores. The first one's tasks and metrics make the rows.
        baseline: one of the models, or None.
        metadata: what `command_metadata` returns.
    """
    found = {
        model.name: {(task.task, metric.name): (task.documents, metric) for task in tasks for metric in task.metrics}
        for model, tasks in scored
    }
    first, judged, name = scored[0][1], settings.limit is None, baseline.name if baseline else None
    deviations = [find_deviations(model.source, settings.max_length, tasks) for model, tasks in scored]
    return Comparison(
        **dataclasses.asdict(settings),
        **metadata,
        tasks=[task.task for task in first],
        task_details={task.task: TaskDetails(task.version, task.num_documents, task.data) for task in first},
        baseline=name,
        models=[model for model, _ in scored],
        warnings=list(itertools.chain(*deviations)) if judged else [],
        rows=[_row(task.task, metric, found, name, judged=judged) for task in first for metric in task.metrics],
    )


def _row(
    task: str, metric: Metric, found: Mapping[str, Mapping[Any, Found]], baseline: str | None, *, judged: bool
) -> ComparisonRow:
    scores = {name: metrics.get((task, metric.name)) for name, metrics in found.items()}
    differences = {}
    for name in scores if baseline else ():
        if name != baseline and (difference := _difference(scores[name], scores[baseline or ""])):
            differences[name] = difference if judged else dataclasses.replace(difference, verdict=None)
    values = {name: Score(its[1].value, its[1].stderr) if its else Score(None) for name, its in scores.items()}
    return ComparisonRow(task, metric.name, metric.higher_is_better, values, differences)


def _difference(ours: Found | None, theirs: Found | None) -> Difference | None:
    if ours is None or theirs is None:
        return None
    (our_documents, our), (their_documents, their) = ours, theirs
    if our.value is None or their.value is None:
        return None
    unpaired = Difference(our.value - their.value)
    if our_documents != their_documents or our.aggregation is None or not len(our.values) == len(their.values) > 1:
        return unpaired
    mine, base = our.array(), their.array()
    if mine.ndim > 1 and not (mine[:, 1] == base[:, 1]).all():
        return unpaired  # per token, of two tokenizers
    return paired(our.name, our.aggregation, mine, base, higher_is_better=our.higher_is_better)

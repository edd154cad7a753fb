"""Read the scores of a model from lm-eval's results, and compare models."""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpt2_repro.errors import RunFailed
from gpt2_repro.evaluation.comparison import ComparedModel, Comparison, ComparisonRow, Difference, Score, TaskDetails
from gpt2_repro.evaluation.references import published_scores
from gpt2_repro.evaluation.statistics import (
    AGGREGATIONS,
    BITS_PER_BYTE,
    FEWEST,
    MEAN,
    aggregate,
    paired,
    standard_error,
)
from gpt2_repro.tokenization import encode, start_id


COMPLETION = "hellaswag_completion"
WHOLE_DOCUMENTS = ("word_perplexity", "byte_perplexity", "bits_per_byte", "nats_per_token")


@dataclasses.dataclass(frozen=True)
class EvaluationSettings:
    """The settings of an evaluation, the same for all models of a comparison.

    Args:
        max_length: window in tokens. Longer inputs are truncated on the left.
        limit: the number of documents to score per task, or None for all.
    """

    max_length: int
    batch_size: int
    seed: int
    device: str
    limit: int | None


@dataclasses.dataclass(frozen=True)
class Metric:
    """One metric of a task for one model: a score and its values per document."""

    name: str
    value: float | None
    stderr: float | None
    higher_is_better: bool | None
    aggregation: str | None = None  # one of AGGREGATIONS, or None
    values: list[Any] = dataclasses.field(default_factory=list)  # per document; with weights: [value, weight]

    def array(self) -> NDArray[np.float64]:
        """Return `values` with shape [documents], or [documents, 2] with weights."""
        return np.asarray(self.values, dtype=np.float64)


@dataclasses.dataclass(frozen=True)
class TaskScores:
    """The scores of a model on a task, and the documents that were scored."""

    task: str
    version: Any
    data: str | None
    documents: list[str]  # a hash of each document, in the order of Metric.values
    num_documents: int | None  # scored documents; None for a group of tasks
    metrics: list[Metric]


ScoredModel = tuple[ComparedModel, list[TaskScores]]


def read_scores(results: Mapping[str, Any], samples: Mapping[str, Sequence[Any]], tokenizer: Any) -> list[TaskScores]:
    """Return the scores of every task, subtask and group that lm-eval scored.

    Args:
        results: lm-eval's results (version 0.4.13).
        samples: lm-eval's logged samples by task.
        tokenizer: the model's tokenizer, to count tokens for the metric `nats_per_token`.

    Raises RunFailed for log-probabilities that are not finite.
    """
    scores = []
    for task, entries in results["results"].items():
        logged = sorted(samples.get(task, ()), key=lambda sample: sample["doc_id"])
        require_finite(task, logged)
        # Keys of metrics are `<metric>,<filter>`. Other entries: alias, sample_len, `<metric>_stderr,<filter>`.
        keys = [
            key for key in entries if "," in key and "_stderr," not in key and isinstance(entries[key], int | float)
        ]
        metrics = [_metric(results, task, key, logged) for key in keys]
        if any(metric.name == "word_perplexity" for metric in metrics):
            metrics.append(_nats_per_token(logged, tokenizer))
        data = results.get("configs", {}).get(task, {}).get("dataset_path")
        version, documents = results.get("versions", {}).get(task), [sample["doc_hash"] for sample in logged]
        num_documents = results.get("n-samples", {}).get(task, {}).get("effective")
        scores.append(TaskScores(task, version, data, documents, num_documents, metrics))
    return scores


def require_finite(task: str, samples: Sequence[Mapping[str, Any]]) -> None:
    """Raise RunFailed if a document has a log-probability that is not finite."""
    for sample in samples:
        for answer in sample["filtered_resps"]:
            number = answer[0] if isinstance(answer, list | tuple) else answer
            if isinstance(number, int | float) and not math.isfinite(number):
                text = f"{task}: document {sample['doc_id']} has the log-probability {number}."
                raise RunFailed(f"{text} Check the run's metrics for steps with NaN or infinite values.")


def _metric(results: Mapping[str, Any], task: str, key: str, samples: Sequence[Mapping[str, Any]]) -> Metric:
    metric, filter_name = key.split(",", 1)
    entries = results["results"][task]
    aggregation = _aggregation(results.get("configs", {}).get(task, {}), metric)
    values = [sample[metric] for sample in samples if sample["filter"] == filter_name and metric in sample]
    if aggregation not in AGGREGATIONS or not values:
        aggregation, values = None, []
    stderr = entries.get(f"{metric}_stderr,{filter_name}")
    if aggregation is not None and len(values) > 1:
        stderr = standard_error(aggregation, values)
    name = metric if filter_name == "none" else f"{metric} ({filter_name})"
    higher_is_better = results.get("higher_is_better", {}).get(task, {}).get(metric)
    return Metric(name, _finite(entries[key]), _finite(stderr), higher_is_better, aggregation, values)


def _aggregation(config: Mapping[str, Any], metric: str) -> str | None:
    from lm_eval.api.registry import get_metric_aggregation

    named = [entry.get("aggregation") for entry in config.get("metric_list") or () if entry.get("metric") == metric]
    if not named:
        return None  # a group of tasks
    name = named[0] or getattr(get_metric_aggregation(metric), "__name__", None)
    return name if isinstance(name, str) else None


def _finite(value: Any) -> float | None:
    """Return a finite number, or None for NaN, infinity and lm-eval's "N/A"."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _nats_per_token(samples: Sequence[Mapping[str, Any]], tokenizer: Any) -> Metric:
    """Return the metric `nats_per_token`: the mean loss over all tokens."""
    # BITS_PER_BYTE divides by ln 2. Multiplying by ln 2 first gives nats.
    nats = [sample["word_perplexity"][0] * math.log(2) for sample in samples]
    texts = [sample["arguments"][0][0] for sample in samples]
    # Without a separator, the first token of a document is only context.
    tokens = [max(0, len(ids) - (start_id(tokenizer) is None)) for ids in encode(tokenizer, texts)]
    values = [list(pair) for pair in zip(nats, tokens, strict=True)]
    loss = aggregate(BITS_PER_BYTE, np.asarray(values, dtype=np.float64))
    stderr = standard_error(BITS_PER_BYTE, values) if len(values) > 1 else None
    return Metric("nats_per_token", loss, stderr, False, BITS_PER_BYTE, values)


def completion_scores(right: list[float], data: str, documents: list[str]) -> TaskScores:
    """Return HellaSwag's completion scores from 1 (right) or 0 (wrong) per item."""
    # lm-eval's standard error has another rounding error.
    stderr = float(np.std(right, ddof=1) / math.sqrt(len(right))) if len(right) > 1 else None
    metric = Metric("completion", float(np.mean(right)), stderr, True, MEAN, right)
    return TaskScores(COMPLETION, 1.0, data, documents, len(right), [metric])


def compare(
    scored: Sequence[ScoredModel],
    baseline: ComparedModel | None,
    settings: EvaluationSettings,
    metadata: Mapping[str, Any],
) -> Comparison:
    """Return the scores of all models and their differences from the baseline.

    If `settings.limit` is set, no difference gets a verdict such as "better".

    Args:
        scored: models with their scores. The first model's tasks and metrics become the rows of the table.
        metadata: the result of `run_metadata`.
    """
    first, judged = scored[0][1], settings.limit is None
    deviations = [find_deviations(model.source, settings.max_length, tasks) for model, tasks in scored]
    return Comparison(
        **dataclasses.asdict(settings),
        **metadata,
        tasks=[task.task for task in first],
        task_details={task.task: TaskDetails(task.version, task.num_documents, task.data) for task in first},
        baseline=baseline.name if baseline else None,
        models=[model for model, _ in scored],
        warnings=list(itertools.chain(*deviations)) if judged else [],
        rows=[_row(task, metric, scored, baseline, judged) for task in first for metric in task.metrics],
    )


def _row(
    task: TaskScores, metric: Metric, scored: Sequence[ScoredModel], baseline: ComparedModel | None, judged: bool
) -> ComparisonRow:
    """Return the row of one metric of one task."""
    measured = {
        model.name: (one, other)
        for model, tasks in scored
        for one in tasks
        for other in one.metrics
        if (one.task, other.name) == (task.task, metric.name)
    }
    values, differences = {}, {}
    base_task, base = measured.get(baseline.name, (None, None)) if baseline else (None, None)
    for model, _ in scored:
        one, other = measured.get(model.name, (None, None))
        values[model.name] = Score(other.value, other.stderr) if other else Score(None)
        if baseline and base_task and base and one and other and model.name != baseline.name:
            difference = _difference(other, base, same_documents=one.documents == base_task.documents)
            # Without a separator, the first token of each document is not scored.
            comparable = metric.name not in WHOLE_DOCUMENTS or model.has_separator == baseline.has_separator
            if difference:
                verdict = difference.verdict if judged and comparable else None
                differences[model.name] = dataclasses.replace(difference, verdict=verdict)
    return ComparisonRow(task.task, metric.name, metric.higher_is_better, values, differences)


def _difference(ours: Metric, theirs: Metric, *, same_documents: bool) -> Difference | None:
    if ours.value is None or theirs.value is None:
        return None
    verdict = f"too few documents (1 of {FEWEST})" if len(ours.values) == len(theirs.values) == 1 else None
    unpaired = Difference(ours.value - theirs.value, verdict=verdict)
    if not same_documents or ours.aggregation is None or not len(ours.values) == len(theirs.values) > 1:
        return unpaired
    mine, base = ours.array(), theirs.array()
    if mine.ndim > 1 and not (mine[:, 1] == base[:, 1]).all():
        return unpaired  # scores per token, and the tokenizers differ
    return paired(ours.name, ours.aggregation, mine, base, higher_is_better=ours.higher_is_better)


def find_deviations(model: str, window: int, scores: Sequence[TaskScores]) -> list[str]:
    """Return a message for each score outside the tolerance of the published score."""
    measured = {(task.task, metric.name): metric.value for task in scores for metric in task.metrics}
    lines = []
    for number in published_scores(model, window, {task.task: task.num_documents for task in scores}):
        value = measured.get((number.task, number.metric))
        if value is not None and abs(value - number.value) > number.tolerance:
            known = f"{number.value:.4f} ± {number.tolerance:g} ({number.source})"
            lines.append(f"BROKEN SETUP: {number.task} {number.metric} of {model} is {value:.4f}. Published: {known}")
    return lines


def published_baseline(model: str, window: int, scores: Sequence[TaskScores]) -> ScoredModel | None:
    """Return the published scores comparable with `scores` as a baseline, if any."""
    numbers = published_scores(model, window, {task.task: task.num_documents for task in scores})
    tasks = [
        TaskScores(one.task, None, "published", [], None, [Metric(one.metric, one.value, one.stderr, None)])
        for one in numbers
    ]
    sources = list(dict.fromkeys(one.source for one in numbers))
    return (ComparedModel(f"{model} (published)", model, published_by=sources), tasks) if numbers else None

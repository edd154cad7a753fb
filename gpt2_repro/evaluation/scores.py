"""Read the scores of a model from lm-eval's results, and compare models."""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpt2_repro.errors import RunFailed
from gpt2_repro.evaluation import statistics
from gpt2_repro.evaluation.comparison import (
    NO_SCORE,
    ComparedModel,
    Comparison,
    ComparisonRow,
    Difference,
    EvaluationSettings,
    Score,
    TaskDetails,
)
from gpt2_repro.evaluation.references import published_scores
from gpt2_repro.tokenization import encode, start_id


COMPLETION = "hellaswag_completion"
WHOLE_DOCUMENTS = ("word_perplexity", "byte_perplexity", "bits_per_byte", "nats_per_token")


class Job(NamedTuple):
    """A task to score. The tasks in `folder` (see `write_task_files`) replace lm-eval's tasks of the same names."""

    task: str
    settings: EvaluationSettings
    folder: Path


@dataclasses.dataclass(frozen=True)
class Metric:
    """One metric of a task for one model: a score and its values per document.

    `num_documents` is None for a group of tasks. `documents` has a hash of each document, in the order of `values`.
    """

    task: str
    name: str
    value: float | None
    stderr: float | None
    higher_is_better: bool | None
    aggregation: str | None = None  # one of statistics.AGGREGATIONS, or None
    values: list[Any] = dataclasses.field(default_factory=list)  # per document; with weights: [value, weight]
    documents: list[str] = dataclasses.field(default_factory=list)
    num_documents: int | None = None
    version: Any = None
    data: str | None = None

    def array(self) -> NDArray[np.float64]:
        """Return `values` with shape [documents], or [documents, 2] with weights."""
        return np.asarray(self.values, dtype=np.float64)


ScoredModel = tuple[ComparedModel, list[Metric]]


def read_scores(results: Mapping[str, Any], samples: Mapping[str, Sequence[Any]], tokenizer: Any) -> list[Metric]:
    """Return the metrics of every task, subtask and group that lm-eval scored.

    Args:
        results: lm-eval's results (version 0.4.13).
        samples: lm-eval's logged samples by task.
        tokenizer: the model's tokenizer, to count tokens for the metric `nats_per_token`.

    Raises RunFailed for log-probabilities that are not finite.
    """
    scores: list[Metric] = []
    for task, entries in results["results"].items():
        logged = sorted(samples.get(task, ()), key=lambda sample: sample["doc_id"])
        require_finite(task, logged)
        # Keys of metrics are `<metric>,<filter>`. Other entries: alias, sample_len, `<metric>_stderr,<filter>`.
        numbers = [key for key, value in entries.items() if "," in key and isinstance(value, int | float)]
        metrics = [_metric(results, task, key, logged) for key in numbers if "_stderr," not in key]
        if any(metric.name == "word_perplexity" for metric in metrics):
            metrics.append(_nats_per_token(task, logged, tokenizer))
        shared = {
            "documents": [sample["doc_hash"] for sample in logged],
            "num_documents": results.get("n-samples", {}).get(task, {}).get("effective"),
            "version": results.get("versions", {}).get(task),
            "data": results.get("configs", {}).get(task, {}).get("dataset_path"),
        }
        scores += [dataclasses.replace(metric, **shared) for metric in metrics]
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
    if aggregation not in statistics.AGGREGATIONS or not values:
        aggregation, values = None, []
    stderr = statistics.standard_error(aggregation, values)
    stderr = entries.get(f"{metric}_stderr,{filter_name}") if stderr is None else stderr
    name = metric if filter_name == "none" else f"{metric} ({filter_name})"
    higher_is_better = results.get("higher_is_better", {}).get(task, {}).get(metric)
    return Metric(task, name, _finite(entries[key]), _finite(stderr), higher_is_better, aggregation, values)


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


def _nats_per_token(task: str, samples: Sequence[Mapping[str, Any]], tokenizer: Any) -> Metric:
    """Return the metric `nats_per_token`: the mean loss over all tokens."""
    # statistics.BITS_PER_BYTE divides by ln 2. Multiplying by ln 2 first gives nats.
    nats = [sample["word_perplexity"][0] * math.log(2) for sample in samples]
    texts = [sample["arguments"][0][0] for sample in samples]
    # Without a separator, the first token of a document is only context.
    tokens = [max(0, len(ids) - (start_id(tokenizer) is None)) for ids in encode(tokenizer, texts)]
    values = list(map(list, zip(nats, tokens, strict=True)))
    aggregation = statistics.BITS_PER_BYTE
    loss = statistics.aggregate(aggregation, np.asarray(values, dtype=np.float64))
    stderr = statistics.standard_error(aggregation, values)
    return Metric(task, "nats_per_token", loss, stderr, False, aggregation, values)


def completion_scores(right: list[float], data: str, documents: list[str]) -> Metric:
    """Return HellaSwag's completion score from 1 (right) or 0 (wrong) per item."""
    # lm-eval's standard error has another rounding error.
    stderr = float(np.std(right, ddof=1) / math.sqrt(len(right))) if len(right) > 1 else None
    metric = Metric(COMPLETION, "completion", float(np.mean(right)), stderr, True, statistics.MEAN, right)
    return dataclasses.replace(metric, documents=documents, num_documents=len(right), version=1.0, data=data)


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
    deviations = [find_deviations(model.source, settings.max_length, metrics) for model, metrics in scored]
    return Comparison(
        **dataclasses.asdict(settings),
        **metadata,
        tasks=list(dict.fromkeys(one.task for one in first)),
        task_details={one.task: TaskDetails(one.version, one.num_documents, one.data) for one in first},
        baseline=baseline.name if baseline else None,
        models=[model for model, _ in scored],
        warnings=list(itertools.chain(*deviations)) if judged else [],
        rows=[_row(metric, scored, baseline, judged) for metric in first],
    )


def _row(metric: Metric, scored: Sequence[ScoredModel], baseline: ComparedModel | None, judged: bool) -> ComparisonRow:
    """Return the row of one metric of one task."""
    key = metric.task, metric.name
    measured = {model.name: one for model, metrics in scored for one in metrics if (one.task, one.name) == key}
    base = measured.get(baseline.name) if baseline else None
    values, differences = {}, {}
    for model, _ in scored:
        ours = measured.get(model.name)
        values[model.name] = Score(ours.value, ours.stderr) if ours else NO_SCORE
        if baseline and base and ours and ours is not base and (difference := _difference(ours, base)):
            # Without a separator, the first token of each document is not scored.
            comparable = metric.name not in WHOLE_DOCUMENTS or model.has_separator == baseline.has_separator
            verdict = difference.verdict if judged and comparable else None
            differences[model.name] = dataclasses.replace(difference, verdict=verdict)
    return ComparisonRow(metric.task, metric.name, metric.higher_is_better, values, differences)


def _difference(ours: Metric, theirs: Metric) -> Difference | None:
    if ours.value is None or theirs.value is None:
        return None
    verdict = f"too few documents (1 of {statistics.FEWEST})" if len(ours.values) == len(theirs.values) == 1 else None
    unpaired = Difference(ours.value - theirs.value, verdict=verdict)
    pairs = len(ours.values) if ours.documents == theirs.documents and len(ours.values) == len(theirs.values) else 0
    if ours.aggregation is None or pairs < 2:
        return unpaired
    mine, base = ours.array(), theirs.array()
    if mine.ndim > 1 and not (mine[:, 1] == base[:, 1]).all():
        return unpaired  # scores per token, and the tokenizers differ
    return statistics.paired(ours.name, ours.aggregation, mine, base, higher_is_better=ours.higher_is_better)


def find_deviations(model: str, window: int, scores: Sequence[Metric]) -> list[str]:
    """Return a message for each score outside the tolerance of the published score."""
    measured = {(metric.task, metric.name): metric.value for metric in scores}
    lines = []
    for number in published_scores(model, window, {metric.task: metric.num_documents for metric in scores}):
        value = measured.get((number.task, number.metric))
        if value is not None and abs(value - number.value) > number.tolerance:
            known = f"{number.value:.4f} ± {number.tolerance:g} ({number.source})"
            lines.append(f"BROKEN SETUP: {number.task} {number.metric} of {model} is {value:.4f}. Published: {known}")
    return lines


def published_baseline(model: str, window: int, scores: Sequence[Metric]) -> ScoredModel | None:
    """Return the published scores comparable with `scores` as a baseline, if any."""
    numbers = published_scores(model, window, {metric.task: metric.num_documents for metric in scores})
    metrics = [Metric(one.task, one.metric, one.value, one.stderr, None, data="published") for one in numbers]
    sources = list(dict.fromkeys(one.source for one in numbers))
    return (ComparedModel(f"{model} (published)", model, published_by=sources), metrics) if numbers else None

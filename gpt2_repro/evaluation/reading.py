"""Read the scores of a model from lm-eval's results."""

import dataclasses
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gpt2_repro.errors import RunFailed
from gpt2_repro.evaluation import statistics
from gpt2_repro.evaluation.comparison import TaskDetails
from gpt2_repro.evaluation.scores import BITS, COMPLETION, OF_TEXT, WHOLE_DOCUMENTS, WORDS, Metric
from gpt2_repro.evaluation.words import has_words
from gpt2_repro.tokenization import encode, lost_text, start_id


logger = logging.getLogger(__name__)

HarnessResults = Mapping[str, Any]  # lm-eval's results (version 0.4.13)
Samples = Sequence[Mapping[str, Any]]  # lm-eval's logged samples of a task


def read_scores(results: HarnessResults, samples: Mapping[str, Samples], tokenizer: Any) -> list[Metric]:
    """Return the metrics of every task, subtask and group that lm-eval scored.

    Args:
        samples: by task.
        tokenizer: the model's tokenizer, to count tokens for the metric `nats_per_token`.

    Raises RunFailed for log-probabilities that are not finite.
    """
    scores: list[Metric] = []
    for task in results["results"]:
        logged = sorted(samples.get(task, ()), key=lambda sample: sample["doc_id"])
        require_finite(task, logged)
        metrics = _metrics_of_task(results, task, logged, tokenizer)
        lossy = _lossy(task, metrics, logged, tokenizer)
        details = _task_details(results, task)
        for metric in metrics:
            metric = dataclasses.replace(metric, details=details)
            if metric.name in OF_TEXT:
                metric = dataclasses.replace(metric, lossy=lossy)
            scores.append(_in_blocks(metric, logged))
    return _join_groups(scores, results.get("group_subtasks", {}))


def require_finite(task: str, samples: Samples) -> None:
    """Raise RunFailed if a document has a log-probability that is not finite."""
    for sample in samples:
        for answer in sample["filtered_resps"]:
            number = answer
            if isinstance(answer, list | tuple):
                number = answer[0]
            if isinstance(number, int | float) and not math.isfinite(number):
                text = f"{task}: document {sample['doc_id']} has the log-probability {number}."
                raise RunFailed(f"{text} Check the run's metrics for steps with NaN or infinite values.")


def _metrics_of_task(results: HarnessResults, task: str, samples: Samples, tokenizer: Any) -> list[Metric]:
    """Return the metrics that lm-eval computed and the project reports, and `nats_per_token`."""
    metrics: dict[str, Metric] = {}  # by lm-eval's key
    for key, value in results["results"][task].items():
        # Keys of metrics are `<metric>,<filter>`. Other entries: alias, sample_len, `<metric>_stderr,<filter>`.
        if "," in key and "_stderr," not in key and isinstance(value, int | float):
            metrics[key] = _metric(results, task, key, samples)

    if task.startswith(BITS):
        return [metric for metric in metrics.values() if metric.name == "bits_per_byte"]
    words = metrics.get(f"{WORDS},none")
    if words is None:
        return list(metrics.values())
    texts = [sample["arguments"][0][0] for sample in samples]
    if not has_words(texts):
        logger.info("%s: white space does not divide the text into words, so %s is left out.", task, WORDS)
        del metrics[f"{WORDS},none"]
    return [*metrics.values(), _nats_per_token(task, samples, texts, tokenizer)]


def _metric(results: HarnessResults, task: str, key: str, samples: Samples) -> Metric:
    metric, filter_name = key.split(",", 1)
    result = results["results"][task]
    values: list[Any] = []
    documents: list[str] = []
    for sample in samples:
        if sample["filter"] == filter_name and metric in sample:
            values.append(sample[metric])
            documents.append(sample["doc_hash"])
    aggregation = _aggregation(results, task, metric)
    if aggregation not in statistics.AGGREGATIONS or not values:
        aggregation = None
        values = []
    stderr = statistics.standard_error(aggregation, values)
    if stderr is None:
        stderr = result.get(f"{metric}_stderr,{filter_name}")
    name = metric
    if task == COMPLETION:
        name = "completion"
    elif filter_name != "none":
        name = f"{metric} ({filter_name})"
    return Metric(
        task=task,
        name=name,
        value=statistics.finite(result[key]),
        stderr=statistics.finite(stderr),
        higher_is_better=_entry(results, "higher_is_better", task).get(metric),
        aggregation=aggregation,
        values=values,
        documents=documents,
    )


def _aggregation(results: HarnessResults, task: str, metric: str) -> str | None:
    """Return how lm-eval aggregates a metric over documents, or None if it is unknown or the task is a group."""
    from lm_eval.api.registry import get_metric_aggregation

    metric_list = _entry(results, "configs", task).get("metric_list") or ()
    for listed in metric_list:
        if listed["metric"] != metric:
            continue
        name: str | None = listed.get("aggregation")
        if not name:
            name = getattr(get_metric_aggregation(metric), "__name__", None)
        return name
    return None


def _nats_per_token(task: str, samples: Samples, texts: Sequence[str], tokenizer: Any) -> Metric:
    """Return the metric `nats_per_token`: the mean loss over all tokens."""
    unscored = 0
    if start_id(tokenizer) is None:
        unscored = 1  # without a separator, the first token of a document is only context
    values: list[list[float]] = []
    documents: list[str] = []
    for sample, ids in zip(samples, encode(tokenizer, texts), strict=True):
        # statistics.BITS_PER_BYTE divides by ln 2. Multiplying by ln 2 first gives nats.
        nats = sample[WORDS][0] * math.log(2)
        tokens = max(0, len(ids) - unscored)
        values.append([nats, tokens])
        documents.append(sample["doc_hash"])
    empty = Metric(
        task=task,
        name="nats_per_token",
        value=None,
        stderr=None,
        higher_is_better=False,
        aggregation=statistics.BITS_PER_BYTE,
    )
    return empty.over(values, documents)


def _lossy(task: str, metrics: Sequence[Metric], samples: Samples, tokenizer: Any) -> str:
    """Return a hash of the texts after encoding and decoding, "" if they are the same or do not matter."""
    if not any(metric.name in OF_TEXT for metric in metrics):
        return ""
    texts = ["".join(sample["arguments"][0]) for sample in samples]
    lossy = lost_text(tokenizer, texts)
    if lossy:
        logger.warning("%s: the tokenizer loses text, so its perplexity or bits per byte are too low.", task)
    return lossy


def _task_details(results: HarnessResults, task: str) -> TaskDetails:
    return TaskDetails(
        version=results.get("versions", {}).get(task),
        documents=_entry(results, "n-samples", task).get("effective"),
        data=_entry(results, "configs", task).get("dataset_path"),
    )


def _entry(results: HarnessResults, kind: str, task: str) -> Mapping[str, Any]:
    """Return what lm-eval's results have of a task, which is nothing for some groups of tasks."""
    entry: Mapping[str, Any] = results.get(kind, {}).get(task, {})
    return entry


def _in_blocks(metric: Metric, samples: Samples) -> Metric:
    """Replace few documents by their windows, because a single text has too few documents for an interval."""
    if metric.name not in WHOLE_DOCUMENTS:
        return metric
    if not metric.values or len(metric.values) >= statistics.FEWEST:
        return metric
    values: list[list[float]] = []
    names: list[str] = []
    for value, name, sample in zip(metric.values, metric.documents, samples, strict=True):
        score, weight = value
        windows = sample["filtered_resps"][0].windows
        total = sum(part for part, _ in windows)
        tokens = sum(scored for _, scored in windows)
        for number, (part, scored) in enumerate(windows):
            if scored and total:
                # The words and bytes of a window are in proportion to its tokens.
                score_of_window = score * part / total
                weight_of_window = weight * scored / tokens
                values.append([score_of_window, weight_of_window])
                names.append(f"{name} {number}")
    return metric.over(values, names, value=metric.value)


def _join_groups(scores: Sequence[Metric], groups: Mapping[str, Sequence[str]]) -> list[Metric]:
    """Leave out the tasks of groups. A group whose score is the mean over all documents gets their values."""
    inside = set[str]().union(*groups.values())
    joined: list[Metric] = []
    for metric in scores:
        if metric.task not in inside:
            joined.append(_join_group(metric, scores, groups.get(metric.task, ())))
    return joined


def _join_group(group: Metric, scores: Sequence[Metric], members: Sequence[str]) -> Metric:
    values: list[Any] = []
    documents: list[str] = []
    parts: list[Metric] = []
    for part in scores:
        is_part = part.task in members and part.name == group.name
        if is_part and part.aggregation == statistics.MEAN:
            parts.append(part)
            values += part.values
            documents += part.documents
    if not values or group.value is None:
        return group
    if not math.isclose(np.mean(values), group.value):
        return group
    first = parts[0]
    details = TaskDetails(group.details.version, len(values), first.details.data)
    return first.over(values, documents, task=group.task, value=group.value, details=details)

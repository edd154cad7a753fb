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


@dataclasses.dataclass(frozen=True)
class ScoredTask:
    """A task that lm-eval scored: a task, a subtask or a group of tasks."""

    name: str
    results: HarnessResults  # of all tasks
    samples: Samples

    def entry(self, kind: str) -> Mapping[str, Any]:
        """Return what the results have of the task, which is nothing for some groups of tasks."""
        entries = self.results.get(kind, {})
        entry: Mapping[str, Any] = entries.get(self.name, {})
        return entry

    @property
    def details(self) -> TaskDetails:
        versions = self.results.get("versions", {})
        return TaskDetails(
            version=versions.get(self.name),
            documents=self.entry("n-samples").get("effective"),
            data=self.entry("configs").get("dataset_path"),
        )

    @property
    def document_texts(self) -> list[str]:
        """The text of each document, for tasks with one text per document."""
        return [sample["arguments"][0][0] for sample in self.samples]


def read_scores(results: HarnessResults, samples: Mapping[str, Samples], tokenizer: Any) -> list[Metric]:
    """Return the metrics of every task, subtask and group that lm-eval scored.

    Args:
        samples: by task.
        tokenizer: the model's tokenizer, to count tokens for the metric `nats_per_token`.

    Raises RunFailed for log-probabilities that are not finite.
    """
    scores: list[Metric] = []
    for name in results["results"]:
        logged = sorted(samples.get(name, ()), key=lambda sample: sample["doc_id"])
        task = ScoredTask(name, results, logged)
        require_finite(task)
        metrics = _metrics_of(task, tokenizer)
        lossy = _lossy(task, metrics, tokenizer)
        for metric in metrics:
            metric = dataclasses.replace(metric, details=task.details)
            if metric.name in OF_TEXT:
                metric = dataclasses.replace(metric, lossy=lossy)
            scores.append(_in_blocks(metric, logged))
    return _join_groups(scores, results.get("group_subtasks", {}))


def require_finite(task: ScoredTask) -> None:
    """Raise RunFailed if a document has a log-probability that is not finite."""
    for sample in task.samples:
        for answer in sample["filtered_resps"]:
            number = answer
            if isinstance(answer, list | tuple):
                number = answer[0]
            if isinstance(number, int | float) and not math.isfinite(number):
                text = f"{task.name}: document {sample['doc_id']} has the log-probability {number}."
                raise RunFailed(f"{text} Check the run's metrics for steps with NaN or infinite values.")


def _metrics_of(task: ScoredTask, tokenizer: Any) -> list[Metric]:
    """Return the metrics that lm-eval computed and the project reports, and `nats_per_token`."""
    metrics: dict[str, Metric] = {}  # by lm-eval's key
    for key, value in task.entry("results").items():
        # Keys of metrics are `<metric>,<filter>`. Other entries: alias, sample_len, `<metric>_stderr,<filter>`.
        is_metric = "," in key and "_stderr," not in key
        if is_metric and isinstance(value, int | float):
            metrics[key] = _metric(task, key)

    if task.name.startswith(BITS):
        return [metric for metric in metrics.values() if metric.name == "bits_per_byte"]
    words_key = f"{WORDS},none"
    if words_key not in metrics:
        return list(metrics.values())
    if not has_words(task.document_texts):
        logger.info("%s: white space does not divide the text into words, so %s is left out.", task.name, WORDS)
        del metrics[words_key]
    return [*metrics.values(), _nats_per_token(task, tokenizer)]


def _metric(task: ScoredTask, key: str) -> Metric:
    metric, filter_name = key.split(",", 1)
    values: list[Any] = []
    documents: list[str] = []
    for sample in task.samples:
        if sample["filter"] == filter_name and metric in sample:
            values.append(sample[metric])
            documents.append(sample["doc_hash"])
    aggregation = _aggregation(task, metric)
    if aggregation not in statistics.AGGREGATIONS or not values:
        aggregation = None
        values = []
    stderr = statistics.standard_error(aggregation, values)
    results = task.entry("results")
    if stderr is None:
        stderr = results.get(f"{metric}_stderr,{filter_name}")
    name = metric
    if task.name == COMPLETION:
        name = "completion"
    elif filter_name != "none":
        name = f"{metric} ({filter_name})"
    return Metric(
        task=task.name,
        name=name,
        value=statistics.finite(results[key]),
        stderr=statistics.finite(stderr),
        higher_is_better=task.entry("higher_is_better").get(metric),
        aggregation=aggregation,
        values=values,
        documents=documents,
    )


def _aggregation(task: ScoredTask, metric: str) -> str | None:
    """Return how lm-eval aggregates a metric over documents, or None if it is unknown or the task is a group."""
    from lm_eval.api.registry import get_metric_aggregation

    listed_metrics = task.entry("configs").get("metric_list") or ()
    for listed in listed_metrics:
        if listed["metric"] != metric:
            continue
        name: str | None = listed.get("aggregation")
        if not name:
            aggregate = get_metric_aggregation(metric)
            name = getattr(aggregate, "__name__", None)
        return name
    return None


def _nats_per_token(task: ScoredTask, tokenizer: Any) -> Metric:
    """Return the metric `nats_per_token`: the mean loss over all tokens."""
    unscored = 0
    if start_id(tokenizer) is None:
        unscored = 1  # without a separator, the first token of a document is only context
    values: list[list[float]] = []
    documents: list[str] = []
    for sample, ids in zip(task.samples, encode(tokenizer, task.document_texts), strict=True):
        # statistics.BITS_PER_BYTE divides by ln 2. Multiplying by ln 2 first gives nats.
        nats = sample[WORDS][0] * math.log(2)
        tokens = max(0, len(ids) - unscored)
        values.append([nats, tokens])
        documents.append(sample["doc_hash"])
    empty = Metric(
        task=task.name,
        name="nats_per_token",
        value=None,
        stderr=None,
        higher_is_better=False,
        aggregation=statistics.BITS_PER_BYTE,
    )
    return empty.over(values, documents)


def _lossy(task: ScoredTask, metrics: Sequence[Metric], tokenizer: Any) -> str:
    """Return a hash of the texts after encoding and decoding, "" if they are the same or do not matter."""
    if not any(metric.name in OF_TEXT for metric in metrics):
        return ""
    texts: list[str] = []
    for sample in task.samples:
        context_and_continuation = sample["arguments"][0]
        texts.append("".join(context_and_continuation))
    lossy = lost_text(tokenizer, texts)
    if lossy:
        logger.warning("%s: the tokenizer loses text, so its perplexity or bits per byte are too low.", task.name)
    return lossy


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
    inside: set[str] = set()
    for members in groups.values():
        inside.update(members)
    joined: list[Metric] = []
    for metric in scores:
        if metric.task not in inside:
            members = groups.get(metric.task, ())
            joined.append(_join_group(metric, scores, members))
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
    details = TaskDetails(
        version=group.details.version,
        documents=len(values),
        data=first.details.data,
    )
    return first.over(values, documents, task=group.task, value=group.value, details=details)

"""Read the scores of a model from lm-eval's results, and compare models."""

import dataclasses
import logging
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpt2_repro.errors import RunFailed
from gpt2_repro.evaluation import statistics
from gpt2_repro.evaluation.comparison import (
    CLEAN,
    NO_SCORE,
    ComparedModel,
    Comparison,
    ComparisonRow,
    Difference,
    EvaluationSettings,
    Score,
    TaskDetails,
)
from gpt2_repro.evaluation.references import published_score
from gpt2_repro.evaluation.words import has_words
from gpt2_repro.tokenization import encode, lost_text, start_id


logger = logging.getLogger(__name__)

COMPLETION = "hellaswag_completion"
BITS = "bits_per_byte_"  # begins the names of tasks of local text files
WORDS = "word_perplexity"
WHOLE_DOCUMENTS = (WORDS, "byte_perplexity", "bits_per_byte", "nats_per_token")
OF_TEXT = (*WHOLE_DOCUMENTS, "perplexity")  # metrics that are too good if the tokenizer loses text


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
    seeds: list[float] = dataclasses.field(default_factory=list)  # the scores of several seeds
    # A hash of the texts after encoding and decoding, "" if they are the same or do not matter.
    lossy: str = ""

    def over(self, values: list[Any], documents: list[str], **changes: Any) -> "Metric":
        """Return this metric over other documents, with the value and standard error that follow from `values`."""
        assert self.aggregation is not None
        value = statistics.finite(statistics.aggregate(self.aggregation, np.asarray(values, dtype=np.float64)))
        stderr = statistics.standard_error(self.aggregation, values)
        changes = {"value": value, "stderr": stderr} | changes
        return dataclasses.replace(self, values=values, documents=documents, **changes)

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
        if any(metric.name == WORDS for metric in metrics):
            texts = [sample["arguments"][0][0] for sample in logged]
            metrics.append(_nats_per_token(task, logged, texts, tokenizer))
            if not task.startswith(BITS) and not has_words(texts):
                logger.info("%s: white space does not divide the text into words, so %s is left out.", task, WORDS)
                metrics = [metric for metric in metrics if metric.name != WORDS]
        if any(metric.name in OF_TEXT for metric in metrics):
            lossy = lost_text(tokenizer, ["".join(sample["arguments"][0]) for sample in logged])
            if lossy:
                logger.warning("%s: the tokenizer loses text, so its perplexity or bits per byte are too low.", task)
            metrics = [dataclasses.replace(one, lossy=lossy) if one.name in OF_TEXT else one for one in metrics]
        if task.startswith(BITS):
            metrics = [metric for metric in metrics if metric.name == "bits_per_byte"]
        documents, version = [sample["doc_hash"] for sample in logged], results.get("versions", {}).get(task)
        count = results.get("n-samples", {}).get(task, {}).get("effective")
        data = results.get("configs", {}).get(task, {}).get("dataset_path")
        for metric in metrics:
            known = dataclasses.replace(metric, documents=documents, num_documents=count, version=version, data=data)
            scores.append(_in_blocks(known, logged))
    return _join_groups(scores, results.get("group_subtasks", {}))


def _join_groups(scores: Sequence[Metric], groups: Mapping[str, Sequence[str]]) -> list[Metric]:
    """Leave out the tasks of groups. A group whose score is the mean over all documents gets their values."""
    inside = {task for members in groups.values() for task in members}
    joined = []
    for metric in (metric for metric in scores if metric.task not in inside):
        parts = [one for one in scores if one.task in groups.get(metric.task, ()) and one.name == metric.name]
        values = [value for part in parts for value in part.values if part.aggregation == statistics.MEAN]
        if values and metric.value is not None and math.isclose(np.mean(values), metric.value):
            documents = [name for part in parts for name in part.documents]
            group = parts[0].over(values, documents, value=metric.value, num_documents=len(values))
            metric = dataclasses.replace(group, task=metric.task, version=metric.version)
        joined.append(metric)
    return joined


def _in_blocks(metric: Metric, samples: Sequence[Mapping[str, Any]]) -> Metric:
    """Replace few documents by their windows, because a single text has too few documents for an interval."""
    if metric.name not in WHOLE_DOCUMENTS or not 0 < len(metric.values) < statistics.FEWEST:
        return metric
    values, names = [], []
    for (score, weight), name, sample in zip(metric.values, metric.documents, samples, strict=True):
        windows = sample["filtered_resps"][0].windows
        total, tokens = sum(part for part, _ in windows), sum(scored for _, scored in windows)
        # The words and bytes of a window are in proportion to its tokens.
        values += [[score * part / total, weight * scored / tokens] for part, scored in windows if scored and total]
        names += [f"{name} {number}" for number, (_, scored) in enumerate(windows) if scored and total]
    return metric.over(values, names, value=metric.value)


def join_seeds(
    scored: Sequence[ScoredModel], settings: Mapping[str, str], seeds: Mapping[str, str]
) -> list[ScoredModel]:
    """Join the models that differ only in the seed into one model, with the mean of their scores.

    Of models with equal seeds, only the first is joined, as in the report.

    Args:
        settings: for a model's name, a text that is the same for all models that differ only in the seed.
        seeds: for a model's name, its seeds as text.
    """
    groups: dict[str, list[ScoredModel]] = {}
    for model, metrics in scored:
        groups.setdefault(settings.get(model.name) or model.name, []).append((model, metrics))
    joined: list[ScoredModel] = []
    for members in groups.values():
        firsts: dict[str, ScoredModel] = {}
        repeated: list[ScoredModel] = []
        for model, metrics in members:
            seed = seeds.get(model.name, model.name)
            if seed in firsts:
                repeated.append((model, metrics))
                logger.warning("%s is not another seed: %s has the same seed.", model.name, firsts[seed][0].name)
            else:
                firsts[seed] = model, metrics
        revisions = {model.revision for model, _ in firsts.values()}
        if len(revisions) == len(firsts) > 1:
            joined.append(_joined(list(firsts.values())))
            joined += repeated
        else:
            joined += members  # equal weights are not another seed
    return joined


def _joined(members: Sequence[ScoredModel]) -> ScoredModel:
    models = [model for model, _ in members]
    name = f"{models[0].name}, {len(models)} seeds"
    hashes = "+".join(model.revision[:12] for model in models)
    metrics = []
    for same in zip(*(metrics for _, metrics in members), strict=True):
        first, seeds = same[0], [metric.value for metric in same if metric.value is not None]
        if first.aggregation and len(seeds) == len(same):
            # The mean of the documents' log-probabilities: for perplexities, the geometric mean over the seeds.
            values = np.mean([metric.array() for metric in same], axis=0).tolist()
            metrics.append(first.over(values, first.documents, seeds=seeds))
        else:
            value = float(np.mean(seeds)) if len(seeds) == len(same) else None
            metrics.append(dataclasses.replace(first, value=value, stderr=None, values=[], seeds=seeds))
    sources = ", ".join(model.source for model in models)
    seeds = [model.name for model in models]
    return dataclasses.replace(models[0], name=name, source=sources, revision=hashes, seeds=seeds), metrics


def require_finite(task: str, samples: Sequence[Mapping[str, Any]]) -> None:
    """Raise RunFailed if a document has a log-probability that is not finite."""
    for sample in samples:
        numbers = [answer[0] if isinstance(answer, list | tuple) else answer for answer in sample["filtered_resps"]]
        if bad := [number for number in numbers if isinstance(number, int | float) and not math.isfinite(number)]:
            text = f"{task}: document {sample['doc_id']} has the log-probability {bad[0]}."
            raise RunFailed(f"{text} Check the run's metrics for steps with NaN or infinite values.")


def _metric(results: Mapping[str, Any], task: str, key: str, samples: Sequence[Mapping[str, Any]]) -> Metric:
    from lm_eval.api.registry import get_metric_aggregation

    metric, filter_name = key.split(",", 1)
    entries = results["results"][task]
    listed = results.get("configs", {}).get(task, {}).get("metric_list") or ()  # () for a group of tasks
    entry = next((one for one in listed if one["metric"] == metric), None)
    aggregation = entry and (entry.get("aggregation") or getattr(get_metric_aggregation(metric), "__name__", None))
    values = [sample[metric] for sample in samples if sample["filter"] == filter_name and metric in sample]
    if aggregation not in statistics.AGGREGATIONS or not values:
        aggregation, values = None, []
    stderr = statistics.standard_error(aggregation, values)
    stderr = entries.get(f"{metric}_stderr,{filter_name}") if stderr is None else stderr
    name = "completion" if task == COMPLETION else metric if filter_name == "none" else f"{metric} ({filter_name})"
    higher_is_better = results.get("higher_is_better", {}).get(task, {}).get(metric)
    return Metric(
        task, name, statistics.finite(entries[key]), statistics.finite(stderr), higher_is_better, aggregation, values
    )


def _nats_per_token(task: str, samples: Sequence[Mapping[str, Any]], texts: Sequence[str], tokenizer: Any) -> Metric:
    """Return the metric `nats_per_token`: the mean loss over all tokens."""
    # statistics.BITS_PER_BYTE divides by ln 2. Multiplying by ln 2 first gives nats.
    nats = [sample[WORDS][0] * math.log(2) for sample in samples]
    # Without a separator, the first token of a document is only context.
    tokens = [max(0, len(ids) - (start_id(tokenizer) is None)) for ids in encode(tokenizer, texts)]
    empty = Metric(task, "nats_per_token", None, None, False, statistics.BITS_PER_BYTE)
    return empty.over(list(map(list, zip(nats, tokens, strict=True))), [])


def compare(
    scored: Sequence[ScoredModel],
    baseline: ComparedModel | None,
    settings: EvaluationSettings,
    metadata: Mapping[str, Any],
    flagged: Collection[str] | None = None,
) -> Comparison:
    """Return the scores of all models and their differences from the baseline.

    If `settings.limit` is set, no difference gets a verdict such as "better".

    Args:
        scored: models with their scores. The first model's tasks and metrics become the rows of the table.
        metadata: the result of `run_metadata`.
        flagged: hashes of the documents that overlap with the training data, None if unknown.
    """
    first = scored[0][1]
    return Comparison(
        **dataclasses.asdict(settings),
        **metadata,
        tasks=list(dict.fromkeys(one.task for one in first)),
        task_details={one.task: _details(one, flagged) for one in first if not one.name.endswith(CLEAN)},
        baseline=baseline.name if baseline else None,
        models=[_with_lossy_tasks(model, metrics) for model, metrics in scored],
        rows=[_row(metric, scored, baseline, settings) for metric in first],
    )


def _with_lossy_tasks(model: ComparedModel, metrics: Sequence[Metric]) -> ComparedModel:
    tasks = dict.fromkeys(metric.task for metric in metrics if metric.lossy)
    return dataclasses.replace(model, lossy_tasks=list(tasks))


def _details(metric: Metric, flagged: Collection[str] | None) -> TaskDetails:
    # Windows of a document have the hash of the document and a number.
    overlap = {name.split(" ")[0] for name in metric.documents}.intersection(flagged or ())
    return TaskDetails(metric.version, metric.num_documents, metric.data, None if flagged is None else len(overlap))


def _row(
    metric: Metric, scored: Sequence[ScoredModel], baseline: ComparedModel | None, settings: EvaluationSettings
) -> ComparisonRow:
    """Return the row of one metric of one task."""
    key = metric.task, metric.name
    measured = {model.name: one for model, metrics in scored for one in metrics if (one.task, one.name) == key}
    base = measured.get(baseline.name) if baseline else None
    values, differences, judged = {}, {}, settings.limit is None
    for model, _ in scored:
        values[model.name] = NO_SCORE
        if ours := measured.get(model.name):
            known = published_score(model.source, *key, settings.max_length, ours.num_documents) if judged else None
            values[model.name] = Score(ours.value, ours.stderr, ours.seeds, known)
        if baseline and base and ours and ours is not base and (difference := _difference(ours, base)):
            # Without a separator, the first token of each document is not scored.
            comparable = metric.name not in WHOLE_DOCUMENTS or model.has_separator == baseline.has_separator
            # Unknown, lower-cased and normalized text is easier to predict.
            comparable = comparable and ours.lossy == base.lossy
            verdict = difference.verdict if judged and comparable else None
            one_seed = len(ours.seeds) < 2
            differences[model.name] = dataclasses.replace(difference, verdict=verdict, one_seed=one_seed)
    return ComparisonRow(metric.task, metric.name, metric.higher_is_better, values, differences)


def _per_document(metric: Metric) -> Metric:
    """Join the windows of each document again (see `_in_blocks`)."""
    if metric.name.removesuffix(CLEAN) not in WHOLE_DOCUMENTS:
        return metric
    sums: dict[str, NDArray[np.float64]] = {}
    for name, value in zip(metric.documents, metric.array(), strict=True):
        document = name.split(" ")[0]
        sums[document] = sums.get(document, 0) + value
    return dataclasses.replace(metric, values=[value.tolist() for value in sums.values()], documents=list(sums))


def _difference(ours: Metric, baseline: Metric) -> Difference | None:
    if ours.value is None or baseline.value is None:
        return None
    value = ours.value - baseline.value
    if ours.documents != baseline.documents:
        # The windows of few documents differ between tokenizers.
        ours, baseline = _per_document(ours), _per_document(baseline)
    values, base_values = ours.array(), baseline.array()
    if ours.documents == baseline.documents and len(values) == 1 and ours.name in WHOLE_DOCUMENTS:
        return Difference(value, verdict=statistics.too_few(1))
    paired = ours.documents == baseline.documents and values.shape == base_values.shape and len(values) > 1
    # Otherwise the scores are per token, and the tokenizers differ.
    paired = paired and (values.ndim == 1 or np.allclose(values[:, 1], base_values[:, 1]))
    if ours.aggregation is None or not paired:
        return Difference(value)
    spread = statistics.seed_interval(ours.seeds, baseline.seeds)
    better = ours.higher_is_better
    return statistics.paired(ours.name, ours.aggregation, values, base_values, higher_is_better=better, spread=spread)

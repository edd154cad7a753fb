"""The scores of models: join seeds, and compare models."""

import dataclasses
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

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


logger = logging.getLogger(__name__)

COMPLETION = "hellaswag_completion"
CORE = "core"  # the mean over the tasks of DCLM's CORE
BITS = "bits_per_byte_"  # begins the names of tasks of local text files
WORDS = "word_perplexity"
WHOLE_DOCUMENTS = (WORDS, "byte_perplexity", "bits_per_byte", "nats_per_token")
OF_TEXT = (*WHOLE_DOCUMENTS, "perplexity")  # metrics that are too good if the tokenizer loses text


@dataclasses.dataclass(frozen=True)
class Metric:
    """One metric of a task for one model: a score and its values per document.

    `documents` has a hash of each document, in the order of `values`.
    """

    task: str
    name: str
    value: float | None
    stderr: float | None
    higher_is_better: bool | None
    aggregation: str | None = None  # one of statistics.AGGREGATIONS, or None
    values: list[Any] = dataclasses.field(default_factory=list)  # per document; with weights: [value, weight]
    documents: list[str] = dataclasses.field(default_factory=list)
    details: TaskDetails = TaskDetails()
    seed_scores: list[float] = dataclasses.field(default_factory=list)  # of several seeds
    # A hash of the texts after encoding and decoding, "" if they are the same or do not matter.
    lossy: str = ""

    def over(self, values: list[Any], documents: list[str], **changes: Any) -> "Metric":
        """Return this metric over other documents, with the value and standard error that follow from `values`."""
        assert self.aggregation is not None
        measured = dataclasses.replace(self, values=values, documents=documents)
        value = statistics.aggregate(self.aggregation, measured.array())
        measured = dataclasses.replace(
            measured,
            value=statistics.finite(value),
            stderr=statistics.standard_error(self.aggregation, values),
        )
        return dataclasses.replace(measured, **changes)

    def array(self) -> NDArray[np.float64]:
        """Return `values` with shape [documents], or [documents, 2] with weights."""
        return np.asarray(self.values, dtype=np.float64)


ScoredModel = tuple[ComparedModel, list[Metric]]


def join_seeds(
    scored: Sequence[ScoredModel], settings: Mapping[str, str], seed_keys: Mapping[str, str]
) -> list[ScoredModel]:
    """Join the models that differ only in the seed into one model, with the mean of their scores.

    Of models with equal seeds, only the first is joined, as in the report.

    Args:
        settings: for a model's name, a text that is the same for all models that differ only in the seed.
        seed_keys: for a model's name, its seed and the seed of its data as text.
    """
    groups: dict[str, list[ScoredModel]] = {}
    for model, metrics in scored:
        setting = settings.get(model.name) or model.name
        group = groups.setdefault(setting, [])
        group.append((model, metrics))
    joined: list[ScoredModel] = []
    for group in groups.values():
        joined += _join_setting(group, seed_keys)
    return joined


def _join_setting(members: list[ScoredModel], seed_keys: Mapping[str, str]) -> list[ScoredModel]:
    """Join the models of one setting, and return models with repeated seeds as they are."""
    firsts: dict[str, ScoredModel] = {}  # by seed key
    repeated: list[ScoredModel] = []
    for model, metrics in members:
        key = seed_keys.get(model.name, model.name)
        if key in firsts:
            first, _ = firsts[key]
            logger.warning("%s is not another seed: %s has the same seed.", model.name, first.name)
            repeated.append((model, metrics))
        else:
            firsts[key] = (model, metrics)
    revisions = {model.revision for model, _ in firsts.values()}
    if len(firsts) == 1 or len(revisions) < len(firsts):
        return members  # equal weights are not another seed
    return [_mean_model(list(firsts.values())), *repeated]


def _mean_model(members: Sequence[ScoredModel]) -> ScoredModel:
    """Return the mean over models that differ only in the seed."""
    first, _ = members[0]
    names: list[str] = []
    sources: list[str] = []
    revisions: list[str] = []
    metrics_of_models: list[list[Metric]] = []
    for model, metrics in members:
        names.append(model.name)
        sources.append(model.source)
        revisions.append(model.revision[:12])
        metrics_of_models.append(metrics)
    column = dataclasses.replace(
        first,
        name=f"{first.name}, {len(members)} seeds",
        source=", ".join(sources),
        revision="+".join(revisions),
        seeds=names,
    )
    means = [_mean_over_seeds(metrics) for metrics in zip(*metrics_of_models, strict=True)]
    return column, means


def _mean_over_seeds(metrics: Sequence[Metric]) -> Metric:
    """Return the mean of a metric of several models. It has no value if one of them has none."""
    first = metrics[0]
    seed_scores = [metric.value for metric in metrics if metric.value is not None]
    is_complete = len(seed_scores) == len(metrics)
    if first.aggregation and is_complete:
        # The mean of the documents' log-probabilities: for perplexities, the geometric mean over the seeds.
        arrays = [metric.array() for metric in metrics]
        values = np.mean(arrays, axis=0).tolist()
        return first.over(values, first.documents, seed_scores=seed_scores)
    mean = None
    if is_complete:
        mean = float(np.mean(seed_scores))
    return dataclasses.replace(first, value=mean, stderr=None, values=[], seed_scores=seed_scores)


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
    _, metrics = scored[0]
    details: dict[str, TaskDetails] = {}
    for metric in metrics:
        if not metric.name.endswith(CLEAN):
            details[metric.task] = _with_overlap(metric, flagged)
    models: list[ComparedModel] = []
    for model, metrics_of_model in scored:
        models.append(_with_lossy_tasks(model, metrics_of_model))
    name = None
    if baseline is not None:
        name = baseline.name
    return Comparison(
        **dataclasses.asdict(settings),
        date=metadata["date"],
        command=metadata["command"],
        versions=metadata["versions"],
        task_details=details,
        baseline=name,
        models=models,
        rows=[_row(metric, scored, baseline, settings) for metric in metrics],
    )


def _with_lossy_tasks(model: ComparedModel, metrics: Sequence[Metric]) -> ComparedModel:
    tasks: list[str] = []
    for metric in metrics:
        if metric.lossy and metric.task not in tasks:
            tasks.append(metric.task)
    return dataclasses.replace(model, lossy_tasks=tasks)


def _with_overlap(metric: Metric, flagged: Collection[str] | None) -> TaskDetails:
    """Return the details of a metric's task with the number of `flagged` documents, if that is known."""
    if flagged is None:
        return metric.details
    documents = {document_of(name) for name in metric.documents}
    overlap = documents.intersection(flagged)
    return dataclasses.replace(metric.details, overlap=len(overlap))


def document_of(name: str) -> str:
    """Return the hash of a document. Windows of a document have the hash of the document and a number."""
    document, _, _ = name.partition(" ")
    return document


def _row(
    metric: Metric, scored: Sequence[ScoredModel], baseline: ComparedModel | None, settings: EvaluationSettings
) -> ComparisonRow:
    """Return the row of one metric of one task."""
    measured: dict[str, Metric] = {}
    for model, metrics in scored:
        for one in metrics:
            if one.task == metric.task and one.name == metric.name:
                measured[model.name] = one
    base = None
    if baseline is not None:
        base = measured.get(baseline.name)
    is_judged = settings.limit is None

    values: dict[str, Score] = {}
    for model, _ in scored:
        ours = measured.get(model.name)
        if ours is None:
            values[model.name] = NO_SCORE
            continue
        published = None
        if is_judged:
            documents = ours.details.documents
            published = published_score(model.source, metric.task, metric.name, settings.max_length, documents)
        difference = None
        if baseline is not None and base is not None and ours is not base:
            difference = _difference(ours, base)
            # Without a separator, the first token of each document is not scored.
            same_tokens = metric.name not in WHOLE_DOCUMENTS or model.has_separator == baseline.has_separator
            # Unknown, lower-cased and normalized text is easier to predict.
            same_text = ours.lossy == base.lossy
            if difference is not None and not (is_judged and same_tokens and same_text):
                difference = dataclasses.replace(difference, verdict=None)
        values[model.name] = Score(
            value=ours.value,
            stderr=ours.stderr,
            seeds=ours.seed_scores,
            published=published,
            difference=difference,
        )
    return ComparisonRow(metric.task, metric.name, metric.higher_is_better, values)


def _per_document(metric: Metric) -> Metric:
    """Join the windows of each document again (see `reading._in_blocks`)."""
    if metric.name.removesuffix(CLEAN) not in WHOLE_DOCUMENTS:
        return metric
    sums: dict[str, NDArray[np.float64]] = {}
    for name, value in zip(metric.documents, metric.array(), strict=True):
        document = document_of(name)
        sums[document] = sums.get(document, 0) + value
    values = [value.tolist() for value in sums.values()]
    return dataclasses.replace(metric, values=values, documents=list(sums))


def _difference(ours: Metric, baseline: Metric) -> Difference | None:
    if ours.value is None or baseline.value is None:
        return None
    value = ours.value - baseline.value
    unpaired = Difference(value)
    if ours.documents != baseline.documents:
        # The windows of few documents differ between tokenizers.
        ours = _per_document(ours)
        baseline = _per_document(baseline)
    if ours.documents != baseline.documents:
        return unpaired
    values = ours.array()
    base_values = baseline.array()
    if len(values) == 1 and ours.name in WHOLE_DOCUMENTS:
        return Difference(value, verdict=statistics.too_few(1))
    if ours.aggregation is None or len(values) < 2 or values.shape != base_values.shape:
        return unpaired
    if values.ndim > 1 and not np.allclose(values[:, 1], base_values[:, 1]):
        return unpaired  # the scores are per token, and the tokenizers differ
    return statistics.paired(
        ours.name,
        ours.aggregation,
        values,
        base_values,
        higher_is_better=ours.higher_is_better,
        spread=statistics.seed_interval(ours.seed_scores, baseline.seed_scores),
    )

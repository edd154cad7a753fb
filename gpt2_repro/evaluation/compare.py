"""Compare the scores of models with each other and with published scores."""

import dataclasses
import itertools
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gpt2_repro.evaluation.comparison import ComparedModel, Comparison, ComparisonRow, Difference, Score, TaskDetails
from gpt2_repro.evaluation.scores import COMPLETION, EvaluationSettings, Metric, ScoredModel, TaskScores
from gpt2_repro.evaluation.statistics import FEWEST, paired


logger = logging.getLogger(__name__)

WHOLE_DOCUMENTS = ("word_perplexity", "byte_perplexity", "bits_per_byte", "nats_per_token")
Found = tuple[list[str], Metric]  # hashes of the scored documents, and the metric


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
    found = {
        model.name: {(task.task, metric.name): (task.documents, metric) for task in tasks for metric in task.metrics}
        for model, tasks in scored
    }
    first, judged, name = scored[0][1], settings.limit is None, baseline.name if baseline else None
    # Without a separator, the first token of each document is not scored.
    separated = baseline is None or baseline.has_separator
    comparable = {model.name: judged and model.has_separator == separated for model, _ in scored}
    deviations = [find_deviations(model.source, settings.max_length, tasks) for model, tasks in scored]
    return Comparison(
        **dataclasses.asdict(settings),
        **metadata,
        tasks=[task.task for task in first],
        task_details={task.task: TaskDetails(task.version, task.num_documents, task.data) for task in first},
        baseline=name,
        models=[model for model, _ in scored],
        warnings=list(itertools.chain(*deviations)) if judged else [],
        rows=[
            _row(
                task.task,
                metric,
                found,
                name,
                comparable if metric.name in WHOLE_DOCUMENTS else dict.fromkeys(found, judged),
            )
            for task in first
            for metric in task.metrics
        ],
    )


def _row(
    task: str,
    metric: Metric,
    found: Mapping[str, Mapping[Any, Found]],
    baseline: str | None,
    judged: Mapping[str, bool],
) -> ComparisonRow:
    scores = {name: metrics.get((task, metric.name)) for name, metrics in found.items()}
    base = scores[baseline] if baseline else None
    differences = {}
    for name, its in scores.items():
        if name != baseline and (difference := _difference(its, base)):
            differences[name] = difference if judged[name] else dataclasses.replace(difference, verdict=None)
    values = {name: Score(its[1].value, its[1].stderr) if its else Score(None) for name, its in scores.items()}
    return ComparisonRow(task, metric.name, metric.higher_is_better, values, differences)


def _difference(ours: Found | None, theirs: Found | None) -> Difference | None:
    if ours is None or theirs is None:
        return None
    (our_documents, our), (their_documents, their) = ours, theirs
    if our.value is None or their.value is None:
        return None
    verdict = f"too few documents (1 of {FEWEST})" if len(our.values) == len(their.values) == 1 else None
    unpaired = Difference(our.value - their.value, verdict=verdict)
    if our_documents != their_documents or our.aggregation is None or not len(our.values) == len(their.values) > 1:
        return unpaired
    mine, base = our.array(), their.array()
    if mine.ndim > 1 and not (mine[:, 1] == base[:, 1]).all():
        return unpaired  # scores per token, and the tokenizers differ
    return paired(our.name, our.aggregation, mine, base, higher_is_better=our.higher_is_better)


@dataclasses.dataclass(frozen=True)
class PublishedNumber:
    """A published score, its source, and how much a measured score may differ from it."""

    task: str
    metric: str
    value: float
    tolerance: float
    source: str
    stderr: float | None = None
    window: int | None = None  # None: the same score for any window of 256 tokens or more


# Number of documents in each complete data set. Another split, or a part of the set, has different scores.
DOCUMENTS = {"lambada_openai": 5153, "hellaswag": 10_042, COMPLETION: 10_042, "wikitext": 62}
LM_EVAL = "lm-evaluation-harness, issue 2159 (LAMBADA) and pull request 396 (wikitext)"
HELLASWAG = "build-nanogpt, hellaswag.py: lm-evaluation-harness and its own completion style"
BLOG = "suzyahyah.github.io, July 2025: lm-evaluation-harness at 512 tokens"
# The longest LAMBADA passage has 224 tokens and the longest HellaSwag request 151, so their scores are the same for
# any window of 256 tokens or more.
NUMBERS = {
    "openai-community/gpt2": (
        PublishedNumber("lambada_openai", "perplexity", 40.0554, 0.2, LM_EVAL, stderr=1.4787),
        PublishedNumber("lambada_openai", "acc", 0.3256, 0.003, LM_EVAL, stderr=0.0065),
        PublishedNumber("hellaswag", "acc", 0.2892, 0.003, HELLASWAG, stderr=0.0045),
        PublishedNumber("hellaswag", "acc_norm", 0.3114, 0.003, HELLASWAG, stderr=0.0046),
        PublishedNumber(COMPLETION, "completion", 0.2955, 0.003, HELLASWAG),
        PublishedNumber("wikitext", "word_perplexity", 37.3698, 0.1, LM_EVAL, window=1024),
        PublishedNumber("wikitext", "bits_per_byte", 0.9769, 0.001, LM_EVAL, window=1024),
        PublishedNumber("wikitext", "word_perplexity", 42.5, 0.3, BLOG, window=512),
    )
}


def published_numbers(model: str, window: int, scores: Iterable[TaskScores]) -> list[PublishedNumber]:
    """Return the published scores that are comparable with the measured `scores`.

    Two scores are comparable if both are for the Hub id `model`, for a window of `window` tokens and for all documents
    of the task.
    """
    whole = [task.task for task in scores if task.num_documents == DOCUMENTS.get(task.task, task.num_documents)]
    numbers = [number for number in NUMBERS.get(model, ()) if number.task in whole]
    return [number for number in numbers if number.window == window or (number.window is None and window >= 256)]


def find_deviations(model: str, window: int, scores: Sequence[TaskScores]) -> list[str]:
    """Return a message for each score outside the tolerance of the published score."""
    measured = {(task.task, metric.name): metric.value for task in scores for metric in task.metrics}
    lines = []
    for number in published_numbers(model, window, scores):
        value = measured.get((number.task, number.metric))
        if value is not None and abs(value - number.value) > number.tolerance:
            known = f"{number.value:.4f} ± {number.tolerance:g} ({number.source})"
            lines.append(f"BROKEN SETUP: {number.task} {number.metric} of {model} is {value:.4f}. Published: {known}")
    return lines


def published_baseline(model: str, window: int, scored: Iterable[TaskScores]) -> ScoredModel | None:
    """Return the published scores of a model as a baseline.

    Only scores comparable with the measured scores `scored` are returned (see `published_numbers`). If there are no
    such scores, the result is None.
    """
    if model not in NUMBERS:
        return None
    if not (numbers := published_numbers(model, window, scored)):
        logger.warning("Baseline skipped: no scores of %s are published for these documents and this window.", model)
        return None
    tasks = []
    for number in numbers:
        higher = number.metric not in ("perplexity", "word_perplexity", "bits_per_byte")
        metric = Metric(number.metric, number.value, number.stderr, higher)
        tasks.append(TaskScores(number.task, None, "published", [], None, [metric]))
    sources = list(dict.fromkeys(number.source for number in numbers))
    return ComparedModel(f"{model} (published)", model, published_by=sources), tasks

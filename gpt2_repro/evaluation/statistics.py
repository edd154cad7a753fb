"""Compute standard errors of scores, and of the difference between two scores."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpt2_repro.evaluation.comparison import MARGINS, Difference


RESAMPLES = 10_000
FEWEST = 30  # documents; with fewer the interval is too narrow for a verdict
Z95 = 1.959964  # standard errors on each side of a 95 % interval
# How the harness aggregates a metric over documents (lm_eval/api/metrics.py, 0.4.13).
AGGREGATIONS = "mean", "perplexity", "weighted_perplexity", "bits_per_byte"
MEAN, PERPLEXITY, WEIGHTED_PERPLEXITY, BITS_PER_BYTE = AGGREGATIONS
Values = NDArray[np.float64]  # [documents], or [documents, 2] with weights


def aggregate(aggregation: str, values: Values) -> float:
    """Combine the values of all documents into one score, as lm-eval does.

    `values` has shape [documents], or [documents, 2] if each value has a weight.
    """
    if aggregation == MEAN:
        return float(values.mean())
    if aggregation == PERPLEXITY:
        return math.exp(-values.mean())
    mean = float(values[:, 0].sum() / values[:, 1].sum())
    return math.exp(-mean) if aggregation == WEIGHTED_PERPLEXITY else -mean / math.log(2)


def paired(
    metric: str, aggregation: str, ours: Values, theirs: Values, *, higher_is_better: bool | None
) -> Difference:
    """Return the difference of two models' scores, its standard error and a verdict.

    Args:
        ours, theirs: values of the same documents in the same order. The shape is [documents], or [documents, 2] with
            weights.
    """
    value = aggregate(aggregation, ours) - aggregate(aggregation, theirs)
    if aggregation == MEAN:
        # Two models mostly fail on the same documents, so paired differences have a small standard error. If
        # values are 0 or 1, this is the standard error of McNemar's test.
        stderr = _mean_stderr(ours - theirs)
        # The standard error is unreliable if very few documents differ. The rule of three limits it from below.
        half = max(Z95 * stderr, 3 / len(ours))
        low, high = value - half, value + half
    else:
        our_draws, their_draws = _bootstrapped(aggregation, ours, theirs)
        drawn = our_draws - their_draws
        stderr = float(drawn.std(ddof=1))
        low, high = (float(bound) for bound in np.percentile(drawn, (2.5, 97.5)))
    margin = MARGINS.get(metric)
    if margin is not None and aggregation != MEAN:
        margin *= aggregate(aggregation, theirs)
    verdict = _verdict(low, high, margin, higher_is_better)
    if aggregation == MEAN and np.isin([*ours, *theirs], (0, 1)).all():
        if verdict in ("better", "worse") and not _is_significant(ours, theirs):
            verdict = "inconclusive"
        if verdict == "inconclusive" and margin and len(ours) < 3 / margin:  # see the rule of three above
            verdict = f"too few documents ({len(ours)} of {math.ceil(3 / margin)})"
    elif verdict and len(ours) < FEWEST:
        verdict = f"too few documents ({len(ours)} of {FEWEST})"
    return Difference(float(value), float(stderr), float(low), float(high), verdict)


def _verdict(low: float, high: float, margin: float | None, higher_is_better: bool | None) -> str | None:
    if margin is not None and -margin <= low and high <= margin:
        return "matches"
    if higher_is_better is None:
        return None
    if low <= 0 <= high:
        return "inconclusive"
    return "better" if (low > 0) is higher_is_better else "worse"


def standard_error(aggregation: str, values: Sequence[Any]) -> float:
    """Return the standard error of one model's score.

    `values` contains one value, or one pair of value and weight, per document.
    """
    if aggregation == MEAN:
        from lm_eval.api.metrics import mean_stderr

        return float(mean_stderr(values))
    if aggregation == PERPLEXITY:
        return perplexity_stderr(values)
    # A score weighted by length is bootstrapped over documents. The harness has no standard error for it.
    return float(_bootstrapped(aggregation, np.asarray(values, dtype=np.float64))[0].std(ddof=1))


def perplexity_stderr(log_probabilities: Sequence[float], iterations: int = 100_000) -> float:
    """Compute lm-eval's bootstrapped standard error of a perplexity, but faster."""
    values = np.asarray(log_probabilities, dtype=np.float64)
    chunk = min(1000, iterations)
    # The same random numbers as lm_eval/api/metrics.py (0.4.13), which takes minutes. Chunk i there contains 1,000
    # resamples drawn with random.Random(i), and NumPy's RandomState([i]) gives the same numbers.
    drawn = []
    for index in range(iterations // chunk):
        picks = np.random.RandomState([index]).random_sample((chunk, len(values)))
        picks *= len(values)
        drawn.append(np.exp(-values[picks.astype(np.int64)].mean(axis=1)))
    with np.errstate(over="ignore"):  # a word may have probability 0
        return float(np.concatenate(drawn).std(ddof=1))


def _mean_stderr(values: Values) -> float:
    return float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.inf


def _bootstrapped(aggregation: str, *of_models: Values) -> list[Values]:
    """Return 10,000 (RESAMPLES) bootstrapped scores of each model.

    In each resample, all models are scored on the same documents.
    """
    source, count = np.random.default_rng(0), len(of_models[0])
    piece = max(1, min(RESAMPLES, 1_000_000 // count))  # resamples computed at once, to limit memory
    drawn: list[list[Values]] = [[] for _ in of_models]
    for start in range(0, RESAMPLES, piece):
        picks = source.integers(0, count, size=(min(piece, RESAMPLES - start), count))
        for values, its in zip(of_models, drawn, strict=True):
            drawn_values = values[picks]
            if aggregation == PERPLEXITY:
                means = drawn_values.mean(axis=1)
            else:
                means = drawn_values[..., 0].sum(axis=1) / drawn_values[..., 1].sum(axis=1)
            its.append(-means / math.log(2) if aggregation == BITS_PER_BYTE else np.exp(-means))
    return [np.concatenate(its) for its in drawn]


def _is_significant(ours: Values, theirs: Values) -> bool:
    """Return whether two models differ significantly by McNemar's exact test (5 %).

    `ours` and `theirs` contain 1 for each right answer and 0 for each wrong answer.
    """
    only_ours, only_theirs = int((ours > theirs).sum()), int((theirs > ours).sum())
    differing = only_ours + only_theirs
    if differing > 1000:
        return True  # the 95 % interval of the difference alone decides
    tail = sum(math.comb(differing, right) for right in range(min(only_ours, only_theirs) + 1))
    return 2 * tail / 2**differing < 0.05

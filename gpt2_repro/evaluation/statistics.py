"""Compute standard errors of scores, and of the difference between two scores."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpt2_repro.evaluation.comparison import CLEAN, Difference


RESAMPLES = 10_000
FEWEST = 30  # documents; with fewer the interval is too narrow for a verdict
Z95 = 1.959964  # standard errors on each side of a 95 % interval
# How the harness aggregates a metric over documents (lm_eval/api/metrics.py, 0.4.13).
MEAN = "mean"
PERPLEXITY = "perplexity"
WEIGHTED_PERPLEXITY = "weighted_perplexity"
BITS_PER_BYTE = "bits_per_byte"
AGGREGATIONS = (MEAN, PERPLEXITY, WEIGHTED_PERPLEXITY, BITS_PER_BYTE)
# Two models match if they differ by less than this margin. The margin of an accuracy is absolute: 0.02 is 2 percentage
# points. All other margins are fractions of the baseline's value. The perplexities and bits per byte of a text express
# the same quantity: a difference of 5 % in word perplexity is 1.4 % in bits per byte.
MARGINS: dict[str, float] = {
    "acc": 0.02,
    "acc_norm": 0.02,
    "completion": 0.02,
    "perplexity": 0.05,
    "word_perplexity": 0.05,
    "bits_per_byte": 0.014,
    "nats_per_token": 0.014,
    "byte_perplexity": 0.01,
}
Values = NDArray[np.float64]  # [documents], or [documents, 2] with weights


def finite(value: Any) -> float | None:
    """Return a finite number, or None for NaN, infinity and lm-eval's "N/A"."""
    if isinstance(value, int | float) and math.isfinite(value):
        return float(value)
    return None


def aggregate(aggregation: str, values: Values) -> float:
    """Combine values [documents] or [documents, 2] (with weights) as lm-eval does.

    A perplexity that is too large for a float is infinite.
    """
    columns = np.atleast_2d(values.T)
    with np.errstate(over="ignore"):
        return float(_aggregate(aggregation, *columns))


def _aggregate(aggregation: str, values: Values, weights: Values | None = None, *, axis: int = -1) -> Values:
    if weights is None:
        mean = np.mean(values, axis)
    else:
        mean = np.sum(values, axis) / np.sum(weights, axis)
    if aggregation == MEAN:
        return np.asarray(mean)
    if aggregation == BITS_PER_BYTE:
        return np.asarray(-mean / math.log(2))
    return np.asarray(np.exp(-mean))


def seed_interval(*models: Sequence[float]) -> float:
    """Return half the 95 % interval of a difference of means over seeds (Welch's), or 0 if all have one seed."""
    from scipy import stats

    variance = 0.0
    weighted_squares = 0.0  # of the denominator of Welch's degrees of freedom
    for scores in models:
        if len(scores) > 1:
            squared_error = float(np.var(scores, ddof=1)) / len(scores)
            variance += squared_error
            weighted_squares += squared_error**2 / (len(scores) - 1)
    if not variance:
        return 0.0
    freedom = variance**2 / weighted_squares
    return float(stats.t.ppf(0.975, freedom) * math.sqrt(variance))


def paired(
    metric: str, aggregation: str, ours: Values, baseline: Values, *, higher_is_better: bool | None, spread: float = 0
) -> Difference | None:
    """Return the difference of two models' scores, its standard error and a verdict.

    The result is None if the difference is not finite.

    Args:
        ours, baseline: values of the same documents in the same order. The shape is [documents], or [documents, 2] with
            weights.
        spread: half the 95 % interval that is due to seeds. It enters the interval.
    """
    base_value = aggregate(aggregation, baseline)
    value = aggregate(aggregation, ours) - base_value
    if not math.isfinite(value):
        return None
    stderr, low, high = _interval(aggregation, ours, baseline, value)
    if not np.isfinite([stderr, low, high]).all():
        return Difference(value)  # the perplexity of some resamples is too large for a float
    low = value - math.hypot(value - low, spread)
    high = value + math.hypot(high - value, spread)

    margin = MARGINS.get(metric.removesuffix(CLEAN), 0)
    is_binary = False
    if aggregation == MEAN:
        answers = np.concatenate([ours, baseline])
        is_binary = bool(np.isin(answers, (0, 1)).all())
    else:
        margin *= base_value
    change = _change(low, high, higher_is_better)
    is_decided = change in ("better", "worse")
    if is_binary and is_decided and not _is_significant(ours, baseline):
        change = "inconclusive"
        is_decided = False
    verdict = change
    if margin and -margin <= low and high <= margin:
        verdict = "matches"
    fewest = FEWEST
    if is_binary:
        fewest = 0
        if margin and verdict == "inconclusive":
            fewest = math.ceil(3 / margin)  # by the rule of three, the interval of fewer documents exceeds the margin
    if verdict is not None and len(ours) < fewest:
        verdict = too_few(len(ours), fewest)
    small = None
    if verdict == "matches" and is_decided:
        small = change
    return Difference(value, stderr, low, high, verdict, small)


def _interval(aggregation: str, ours: Values, baseline: Values, value: float) -> tuple[float, float, float]:
    """Return the standard error of the difference `value`, and the ends of its 95 % interval."""
    from scipy import stats

    if aggregation != MEAN:
        bootstrapped = _bootstrap(aggregation, ours, baseline)
        low, high = bootstrapped.confidence_interval
        return float(bootstrapped.standard_error), float(low), float(high)
    # Two models mostly fail on the same documents, so paired differences have a small standard error. If values are 0
    # or 1, this is the standard error of McNemar's test.
    stderr = float(stats.sem(ours - baseline))
    # The standard error is unreliable if very few documents differ. The rule of three limits it from below.
    half = max(Z95 * stderr, 3 / len(ours))
    return stderr, value - half, value + half


def _change(low: float, high: float, higher_is_better: bool | None) -> str | None:
    """Return what an interval says about the model, or None if no direction is better."""
    if higher_is_better is None:
        return None
    if low <= 0 <= high:
        return "inconclusive"
    is_higher = low > 0
    if is_higher is higher_is_better:
        return "better"
    return "worse"


def _is_significant(ours: Values, baseline: Values) -> bool:
    """Return whether answers that are right (1) or wrong (0) differ by McNemar's exact test."""
    from scipy import stats

    only_ours = int((ours > baseline).sum())
    only_baseline = int((baseline > ours).sum())
    test = stats.binomtest(only_ours, only_ours + only_baseline)
    return bool(test.pvalue < 0.05)


def too_few(documents: int, fewest: int = FEWEST) -> str:
    """Return the verdict for an interval that is too narrow or too wide."""
    return f"too few documents ({documents} of {fewest})"


def standard_error(aggregation: str | None, values: Sequence[Any]) -> float | None:
    """Return the standard error of one model's score (see `aggregate`).

    It is None for fewer than two values, and if it is too large for a float.
    """
    if aggregation is None or len(values) < 2:
        return None
    if aggregation == MEAN:
        from lm_eval.api.metrics import mean_stderr

        stderr = mean_stderr(values)
        return finite(float(stderr))
    # Bootstrapped over documents. lm-eval takes minutes for a perplexity, and has none for a score weighted by length.
    array = np.asarray(values, dtype=np.float64)
    score = aggregate(aggregation, array)
    if not math.isfinite(score):
        return None
    bootstrapped = _bootstrap(aggregation, array)
    return finite(float(bootstrapped.standard_error))


def _bootstrap(aggregation: str, *models: Values) -> Any:
    """Bootstrap a score, or the difference of two models on the same resampled documents."""
    from scipy.stats import bootstrap

    arrays = np.concatenate([np.atleast_2d(values.T) for values in models])
    size = len(arrays) // len(models)  # 2 for values with weights, otherwise 1

    def statistic(*drawn: Values, axis: int) -> Values:
        ours = drawn[:size]
        baseline = drawn[size:]
        score = _aggregate(aggregation, *ours, axis=axis)
        if not baseline:
            return score
        return score - _aggregate(aggregation, *baseline, axis=axis)

    documents = len(arrays[0])
    with np.errstate(over="ignore", invalid="ignore"):  # a word may have probability 0
        return bootstrap(
            arrays,
            statistic,
            n_resamples=RESAMPLES,
            batch=max(1, 1_000_000 // documents),  # limits memory
            method="percentile",
            paired=True,
            rng=np.random.default_rng(0),
        )

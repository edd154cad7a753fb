"""Compute standard errors of scores, and of the difference between two scores."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpt2_repro.evaluation.comparison import CLEAN, MARGINS, Difference


RESAMPLES = 10_000
FEWEST = 30  # documents; with fewer the interval is too narrow for a verdict
Z95 = 1.959964  # standard errors on each side of a 95 % interval
# How the harness aggregates a metric over documents (lm_eval/api/metrics.py, 0.4.13).
AGGREGATIONS = "mean", "perplexity", "weighted_perplexity", "bits_per_byte"
MEAN, PERPLEXITY, WEIGHTED_PERPLEXITY, BITS_PER_BYTE = AGGREGATIONS
Values = NDArray[np.float64]  # [documents], or [documents, 2] with weights


def finite(value: Any) -> float | None:
    """Return a finite number, or None for NaN, infinity and lm-eval's "N/A"."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def aggregate(aggregation: str, values: Values) -> float:
    """Combine values [documents] or [documents, 2] (with weights) as lm-eval does.

    A perplexity that is too large for a float is infinite.
    """
    with np.errstate(over="ignore"):
        return float(_aggregate(aggregation, *np.atleast_2d(values.T)))


def _aggregate(aggregation: str, values: Values, weights: Values | None = None, *, axis: int = -1) -> Values:
    mean = np.mean(values, axis) if weights is None else np.sum(values, axis) / np.sum(weights, axis)
    if aggregation == MEAN:
        return np.asarray(mean)
    return np.asarray(-mean / math.log(2) if aggregation == BITS_PER_BYTE else np.exp(-mean))


def seed_interval(*models: Sequence[float]) -> float:
    """Return half the 95 % interval of a difference of means over seeds (Welch's), or 0 if all have one seed."""
    from scipy import stats

    parts = [(np.var(scores, ddof=1) / len(scores), len(scores) - 1) for scores in models if len(scores) > 1]
    variance = sum(part for part, _ in parts)
    freedom = variance**2 / sum(part**2 / degrees for part, degrees in parts) if variance else 1.0
    return float(stats.t.ppf(0.975, freedom) * math.sqrt(variance))


def paired(
    metric: str, aggregation: str, ours: Values, baseline: Values, *, higher_is_better: bool | None, spread: float = 0
) -> Difference:
    """Return the difference of two models' scores, its standard error and a verdict.

    Args:
        ours, baseline: values of the same documents in the same order. The shape is [documents], or [documents, 2] with
            weights.
        spread: half the 95 % interval that is due to seeds. It enters the interval.
    """
    from scipy import stats

    value = aggregate(aggregation, ours) - aggregate(aggregation, baseline)
    if not math.isfinite(value):
        return Difference(None)
    if aggregation == MEAN:
        # Two models mostly fail on the same documents, so paired differences have a small standard error. If
        # values are 0 or 1, this is the standard error of McNemar's test.
        stderr = float(stats.sem(ours - baseline))
        # The standard error is unreliable if very few documents differ. The rule of three limits it from below.
        half = max(Z95 * stderr, 3 / len(ours))
        low, high = value - half, value + half
    else:
        bootstrapped = _bootstrap(aggregation, ours, baseline)
        stderr, (low, high) = float(bootstrapped.standard_error), map(float, bootstrapped.confidence_interval)
    if not all(map(math.isfinite, (stderr, low, high))):
        return Difference(value)  # the perplexity of some resamples is too large for a float
    low, high = value - math.hypot(value - low, spread), value + math.hypot(high - value, spread)
    margin = MARGINS.get(metric.removesuffix(CLEAN), 0)
    margin *= 1 if aggregation == MEAN else aggregate(aggregation, baseline)
    change = None
    if higher_is_better is not None:
        change = "inconclusive" if low <= 0 <= high else "better" if (low > 0) is higher_is_better else "worse"
    binary = aggregation == MEAN and np.isin([*ours, *baseline], (0, 1)).all()
    if binary and change in ("better", "worse"):  # McNemar's exact test
        only_ours, only_baseline = int((ours > baseline).sum()), int((baseline > ours).sum())
        change = change if stats.binomtest(only_ours, only_ours + only_baseline).pvalue < 0.05 else "inconclusive"
    verdict = "matches" if margin and -margin <= low and high <= margin else change
    fewest = FEWEST
    if binary:  # see the rule of three above
        fewest = math.ceil(3 / margin) if margin and verdict == "inconclusive" else 0
    if verdict and len(ours) < fewest:
        verdict = too_few(len(ours), fewest)
    small = change if verdict == "matches" and change in ("better", "worse") else None
    return Difference(value, stderr, low, high, verdict, small)


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

        return finite(float(mean_stderr(values)))
    # Bootstrapped over documents. lm-eval takes minutes for a perplexity, and has none for a score weighted by length.
    array = np.asarray(values, dtype=np.float64)
    if not math.isfinite(aggregate(aggregation, array)):
        return None
    return finite(float(_bootstrap(aggregation, array).standard_error))


def _bootstrap(aggregation: str, *models: Values) -> Any:
    """Bootstrap a score, or the difference of two models on the same resampled documents."""
    from scipy.stats import bootstrap

    arrays = np.concatenate([np.atleast_2d(values.T) for values in models])
    size = len(arrays) // len(models)

    def statistic(*drawn: Values, axis: int) -> Values:
        score = _aggregate(aggregation, *drawn[:size], axis=axis)
        return score - _aggregate(aggregation, *drawn[size:], axis=axis) if len(models) > 1 else score

    rng, batch = np.random.default_rng(0), max(1, 1_000_000 // len(arrays[0]))  # limits memory
    with np.errstate(over="ignore", invalid="ignore"):  # a word may have probability 0
        return bootstrap(
            arrays, statistic, n_resamples=RESAMPLES, batch=batch, method="percentile", paired=True, rng=rng
        )

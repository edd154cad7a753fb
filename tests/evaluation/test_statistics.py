"""Standard errors and differences equal those of lm-eval and of simulations."""

import math

import numpy as np
import pytest
from lm_eval.api import metrics

from gpt2_repro.evaluation.comparison import ComparisonRow, Difference, Score
from gpt2_repro.evaluation.statistics import AGGREGATIONS, aggregate, paired, standard_error


MEAN, PERPLEXITY, WEIGHTED_PERPLEXITY, BITS_PER_BYTE = AGGREGATIONS


source = np.random.default_rng(1)
PAGES = np.stack([-source.uniform(200, 900, 62), source.uniform(100, 300, 62).round()], axis=1)


def test_numbers_are_aggregated_as_the_harness_does() -> None:
    logs = -source.exponential(3, 200)
    for aggregation, values in zip(AGGREGATIONS, (logs, logs, PAGES, PAGES), strict=True):
        theirs = getattr(metrics, aggregation)(values.tolist())
        assert aggregate(aggregation, values) == pytest.approx(theirs, rel=1e-12)


def test_the_error_of_a_perplexity_is_the_harness_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISABLE_MULTIPROC", "1")
    values = (-np.random.default_rng(3).exponential(3, 57)).tolist()
    theirs = metrics.bootstrap_stderr(metrics.perplexity, values, iters=3000)
    assert standard_error(PERPLEXITY, values) == pytest.approx(theirs, rel=0.05)


def test_accuracies_have_mcnemars_error() -> None:
    ours = np.array([1.0] * 60 + [1.0] * 25 + [0.0] * 10 + [0.0] * 5)
    theirs = np.array([1.0] * 60 + [0.0] * 25 + [1.0] * 10 + [0.0] * 5)
    difference = paired("acc", MEAN, ours, theirs, higher_is_better=True)
    variance = (25 + 10 - (25 - 10) ** 2 / 100) / 99 / 100
    assert difference.value == pytest.approx(0.15) and difference.stderr == pytest.approx(math.sqrt(variance))
    assert difference.verdict == "better"
    assert paired("acc", MEAN, theirs, ours, higher_is_better=True).verdict == "worse"


@pytest.mark.parametrize("aggregation", [PERPLEXITY, WEIGHTED_PERPLEXITY, BITS_PER_BYTE])
def test_intervals_cover_the_true_difference(aggregation: str) -> None:
    """95 % intervals miss the true difference in about 10 of 200 simulations."""
    truth, missed = 0.1, 0
    for world in range(200):
        draw = np.random.default_rng(world)
        theirs = -(3 + draw.exponential(1.0, 62))
        ours = theirs - truth + draw.normal(0, 0.3, 62)
        if aggregation != PERPLEXITY:
            weights = draw.uniform(50, 150, 62)
            ours, theirs = np.stack([ours * weights, weights], 1), np.stack([theirs * weights, weights], 1)
        difference = paired("x", aggregation, ours, theirs, higher_is_better=False)
        expected = truth / math.log(2)
        if aggregation != BITS_PER_BYTE:
            expected = math.exp(3 + 1) * math.expm1(truth)  # over all possible documents, not over this sample
        missed += not difference.low <= expected <= difference.high
    assert 4 <= missed <= 20


def test_verdicts_need_the_whole_interval() -> None:
    draw = np.random.default_rng(0)
    theirs = (draw.random(10_000) < 0.3).astype(float)
    flipped = np.where(draw.random(10_000) < 0.01, 1 - theirs, theirs)
    noisy = (draw.random(400) < 0.3).astype(float)
    worse, pages = PAGES * np.array([1.03, 1.0]), "word_perplexity"
    for metric, aggregation, ours, base, higher, verdict in (
        ("acc", MEAN, flipped, theirs, True, "matches"),
        ("acc", MEAN, noisy, theirs[:400], True, "inconclusive"),
        ("acc", MEAN, theirs[:40], theirs[:40], True, "too few documents (40 of 150)"),
        (pages, WEIGHTED_PERPLEXITY, worse, PAGES, False, "worse"),
        (pages, WEIGHTED_PERPLEXITY, PAGES, worse, False, "better"),
        ("unheard_of", MEAN, theirs, theirs, None, None),
    ):
        assert paired(metric, aggregation, ours, base, higher_is_better=higher).verdict == verdict


@pytest.mark.parametrize("higher", [True, False])
def test_a_difference_within_the_margin_can_be_significant(higher: bool) -> None:
    """It is printed with its interval, and not as a match only."""
    draw, small = np.random.default_rng(0), "better" if higher else "worse"
    bits = np.stack([-0.975 * 100 * math.log(2) + draw.normal(size=200), np.full(200, 100.0)], axis=1)
    larger = bits * np.array([1.007, 1.0]) + np.stack([draw.normal(size=200) * 2, np.zeros(200)], axis=1)
    answers = (draw.random(10_000) < 0.3).astype(float)
    more = np.where(np.arange(10_000) < 60, 1.0, answers)
    for metric, aggregation, ours, theirs in (
        ("bits_per_byte", BITS_PER_BYTE, larger, bits),
        ("acc", MEAN, more, answers),
    ):
        difference = paired(metric, aggregation, ours, theirs, higher_is_better=higher)
        assert difference.low is not None and difference.high is not None and difference.low > 0
        cell = ComparisonRow("t", metric, higher, {"m": Score(None, difference=difference)}).change("m")
        assert cell.text.endswith(f" [+{difference.low:.4f}, +{difference.high:.4f}] {small}, and small (one seed)")
    assert Score(0.1, difference=Difference(0.1, small=small)).verdict == "", "not judged"
    few = paired("bits_per_byte", BITS_PER_BYTE, larger[:20], bits[:20], higher_is_better=higher)
    verdict = Score(0.1, difference=few).verdict
    assert "small" not in verdict and "(20 of 30)" in verdict


def test_few_differing_documents_are_inconclusive() -> None:
    theirs = np.zeros(200)
    for right, verdict in ((5, "inconclusive"), (6, "better")):  # p-values of the exact test: 0.0625 and 0.031
        ours = np.where(np.arange(200) < right, 1.0, 0.0)
        assert paired("score", MEAN, ours, theirs, higher_is_better=True).verdict == verdict

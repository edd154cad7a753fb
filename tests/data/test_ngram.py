"""The reference losses against counting with dictionaries."""

import math
from collections import Counter

import numpy as np
import pytest

from gpt2_repro.data.ngram import reference_losses


def flat(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return rows.ravel(), np.full(len(rows), rows.shape[1])


def test_reference_losses_equal_counting_by_hand() -> None:
    source = np.random.default_rng(0)
    vocabulary = 12
    train = source.integers(0, 10, (20, 9)).astype(np.uint16)
    validation = source.integers(0, vocabulary, (5, 9)).astype(np.uint16)  # two ids and most pairs never seen

    unigram, pairs, contexts = Counter(), Counter(), Counter()
    for row in train.tolist():
        for before, after in zip(row, row[1:], strict=False):
            unigram[after] += 1
            pairs[before, after] += 1
            contexts[before] += 1
    total = sum(unigram.values())
    losses = {"unigram": [], "bigram": []}
    for row in validation.tolist():
        for before, after in zip(row, row[1:], strict=False):
            p = (unigram[after] + 1) / (total + vocabulary)
            followers = len({b for a, b in pairs if a == before})
            losses["unigram"].append(-math.log(p))
            q = (pairs[before, after] + followers * p) / (contexts[before] + followers) if contexts[before] else p
            losses["bigram"].append(-math.log(q))
    ours = reference_losses(flat(train), flat(validation), vocabulary)
    assert ours == pytest.approx({name: np.mean(values) for name, values in losses.items()}, rel=1e-12)


def test_a_bigram_text_is_known_to_its_bigram() -> None:
    row = flat(np.array([[0, 1, 2, 3] * 200 + [0]], dtype=np.uint16))
    losses = reference_losses(row, row, 4)
    assert losses["unigram"] == pytest.approx(math.log(4), abs=0.01)
    assert losses["bigram"] < 0.02


def test_no_pair_lies_across_two_rows_of_any_length() -> None:
    # Every 0 is followed by 1 and every 2 by 3 inside the rows; only across them 1 is followed by 2.
    rows = np.array([0, 1, 2, 3, 2, 3, 0, 1], dtype=np.uint16), np.array([2, 4, 2])
    pairs = np.array([0, 1, 2, 3], dtype=np.uint16), np.array([2, 2])
    inside = reference_losses(rows, pairs, 4)["bigram"]
    assert inside < reference_losses(rows, (np.array([1, 2]), np.array([2])), 4)["bigram"]
    assert reference_losses(rows, (np.array([0, 1]), np.array([2])), 4)["bigram"] < math.log(2)

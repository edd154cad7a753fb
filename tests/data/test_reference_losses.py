"""Unigram and bigram losses equal those of a simple implementation with dicts."""

import math
from collections import Counter

import numpy as np
import pytest

from gpt2_repro.data.reference_losses import reference_losses


def flat(rows: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    return np.concatenate(rows).astype(np.uint16), np.array([len(row) for row in rows])


@pytest.mark.parametrize("lengths", [(9,), (2, 3, 9, 17)], ids=["one length", "many lengths"])
def test_reference_losses_equal_counting_by_hand(lengths: tuple[int, ...]) -> None:
    source = np.random.default_rng(0)
    vocabulary = 12
    train = [source.integers(0, 10, source.choice(lengths)).tolist() for _ in range(20)]
    # Two ids and most pairs do not occur in the training rows.
    validation = [source.integers(0, vocabulary, source.choice(lengths)).tolist() for _ in range(8)]

    unigram, pairs, contexts = Counter(), Counter(), Counter()
    for row in train:
        for before, after in zip(row, row[1:], strict=False):
            unigram[after] += 1
            pairs[before, after] += 1
            contexts[before] += 1
    total = sum(unigram.values())
    losses = {"unigram": [], "bigram": []}
    for row in validation:
        for before, after in zip(row, row[1:], strict=False):
            p = (unigram[after] + 1) / (total + vocabulary)
            followers = len({b for a, b in pairs if a == before})
            losses["unigram"].append(-math.log(p))
            q = (pairs[before, after] + followers * p) / (contexts[before] + followers) if contexts[before] else p
            losses["bigram"].append(-math.log(q))
    ours = reference_losses(flat(train), flat(validation), vocabulary)
    assert ours == pytest.approx({name: np.mean(values) for name, values in losses.items()}, rel=1e-12)

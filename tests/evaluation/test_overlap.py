"""Documents that share 13 tokens in a row with training rows are found, and no others."""

import random
import tracemalloc

import numpy as np
import pytest

from gpt2_repro.evaluation import overlap
from gpt2_repro.evaluation.overlap import LENGTH, PIECE, find_overlaps


def test_found_documents_equal_those_of_a_search_in_lists(seed: int) -> None:
    source = random.Random(seed)
    rows = [np.array([source.randrange(3000) for _ in range(PIECE + 500)], np.uint16) for _ in range(2)]
    documents = {}
    for number in range(60):
        ids = [source.randrange(3000) for _ in range(source.randrange(5, 60))]
        if number % 3 == 0:  # shares a run of 11 to 15 ids, also at the border between two pieces
            row, length = source.choice(rows), source.randrange(11, 16)
            at = source.choice([source.randrange(len(row) - 15), PIECE - 7])
            ids[3:3] = row[at : at + length].tolist()
        documents[str(number)] = [[1, 2, 3], ids]
    runs = {tuple(row[at : at + LENGTH].tolist()) for row in rows for at in range(len(row) - LENGTH + 1)}
    expected = {
        name
        for name, texts in documents.items()
        if any(tuple(ids[at : at + LENGTH]) in runs for ids in texts for at in range(len(ids)))
    }
    assert find_overlaps(documents, rows) == expected and 5 < len(expected) < 20


def test_memory_does_not_grow_with_the_training_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "BITS", 4)  # all runs of training tokens pass the table
    source = np.random.default_rng(0)
    documents = {str(number): [source.integers(50_000, size=40).tolist()] for number in range(100)}

    def peak(pieces: int) -> int:
        rows = (source.integers(50_000, size=PIECE, dtype=np.uint16) for _ in range(pieces))
        tracemalloc.start()
        assert find_overlaps(documents, rows) == set()
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    assert peak(40) < 1.2 * peak(4)

"""Documents that share 13 tokens in a row with training rows are found, and no others."""

import random

import numpy as np

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

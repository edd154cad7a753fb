"""Documents that share 13 tokens in a row with training rows are found, and no others."""

import random
import tracemalloc

import numpy as np
import pytest

from gpt2_repro.data.arguments import DataArguments
from gpt2_repro.data.preparation.prepare import prepare
from gpt2_repro.data.prepared import PreparedData
from gpt2_repro.evaluation import overlap
from gpt2_repro.evaluation.overlap import LENGTH, PIECE, find_overlaps, run_length
from gpt2_repro.tokenization import encode


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


@pytest.mark.parametrize("size", [2, 3, 60])
@pytest.mark.parametrize("length", [13, 14, 52, 100])
def test_a_small_vocabulary_gives_no_false_alarms(size: int, length: int) -> None:
    """Also for runs with the same ids in another order, which many pairs of runs have."""
    source = np.random.default_rng(length)
    row = source.integers(size, size=30_000, dtype=np.uint16)
    documents = {str(number): [source.integers(size, size=length + 20).tolist()] for number in range(50)}
    for number in range(5):  # the ids of a training run, permuted
        documents[f"permuted {number}"] = [source.permutation(row[number * 200 :][:length]).tolist()]
    documents["true"] = [row[500:][:length].tolist()]
    runs = {tuple(row[at : at + length].tolist()) for at in range(len(row) - length + 1)}
    expected = {
        name
        for name, (ids,) in documents.items()
        if any(tuple(ids[at : at + length]) in runs for at in range(len(ids) - length + 1))
    }
    assert find_overlaps(documents, [row], length=length) == expected and "true" in expected


def test_a_run_across_arrays_is_found() -> None:
    row = np.arange(100, dtype=np.uint16)
    assert find_overlaps({"a": [list(range(40, 53))]}, [row[:46], row[46:48], row[48:]]) == {"a"}


@pytest.mark.parametrize(("num_bytes", "tokens", "expected"), [(450, 100, 13), (100, 100, 52), (250, 100, 21)])
def test_short_tokens_give_longer_runs(num_bytes: int, tokens: int, expected: int) -> None:
    assert run_length({"a": ["x" * num_bytes]}, {"a": [[1] * tokens]}) == expected


@pytest.mark.parametrize("packing", ["wrap", "concat"])
def test_a_run_across_rows_is_found(packing: str, corpus, documents, tmp_path) -> None:
    """The last id of a row is the first id of the next row of a document."""
    sources = [str(path) for path in corpus]
    data = DataArguments(
        data_files=sources,
        dataset_dir=str(tmp_path),
        sequence_length=16,
        packing=packing,
        tokenizer="train:300",
    )
    prepare(data)
    prepared = PreparedData.read(tmp_path)
    texts = documents[30:100]  # the first documents are the validation split
    ids = dict(zip(texts, ([one] for one in encode(prepared.tokenizer, texts)), strict=True))
    runs = {f"{text} {at}": [one[at : at + 14]] for text, (one,) in ids.items() for at in range(20, len(one) - 50, 7)}
    assert len(runs) > 500
    assert find_overlaps(runs, prepared.rows("train").pieces(), length=14) == runs.keys()


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

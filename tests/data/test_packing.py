"""Packing against a naive reference, and the properties it promises."""

import random

import numpy as np

from gpt2_repro.data.packing import pack_rows, pack_windows


def naive_rows(pieces: list[list[int]], length: int) -> list[list[int]]:
    """Rows of length + 1 with stride length, one id at a time."""
    stream = [token for piece in pieces for token in piece]
    rows = []
    start = 0
    while start + length + 1 <= len(stream):
        rows.append(stream[start : start + length + 1])
        start += length
    return rows


def test_packing_equals_the_naive_reference(seed: int) -> None:
    source = random.Random(seed)
    length = source.choice([1, 2, 7, 32])
    lengths = [source.choice([0, 1, 2, length, length + 1, 3 * length, 200]) for _ in range(source.randint(0, 30))]
    ids = iter(range(1_000_000))
    pieces = [[next(ids) for _ in range(n)] for n in lengths]
    arrays = [np.array(piece, dtype=np.uint32) for piece in pieces]
    blocks = list(pack_rows(iter(arrays), length, rows_per_block=source.choice([1, 3, 4096])))
    rows = np.concatenate(blocks).tolist() if blocks else []
    assert rows == naive_rows(pieces, length)


def test_every_token_but_the_first_is_a_target_once() -> None:
    stream = np.arange(10 * 8 + 1, dtype=np.uint16)
    rows = np.concatenate(list(pack_rows([stream[:13], stream[13:]], 8)))
    assert rows.shape == (10, 9) and rows.dtype == np.uint16
    assert rows[:, 1:].ravel().tolist() == stream[1:].tolist()


def naive_windows(documents: list[list[int]], length: int, min_length: int) -> tuple[list[list[int]], int]:
    """Windows of each document alone, one at a time, and the targets of those that are too short."""
    rows, dropped = [], 0
    for document in documents:
        for start in range(0, len(document) - 1, length):
            row = document[start : start + length + 1]
            if len(row) - 1 >= max(1, min_length):
                rows.append(row)
            else:
                dropped += len(row) - 1
    return rows, dropped


def split_rows(blocks: list[tuple[np.ndarray, np.ndarray]]) -> list[list[int]]:
    return [row.tolist() for ids, lengths in blocks for row in np.split(ids, np.cumsum(lengths)[:-1])]


def test_windows_equal_the_naive_reference(seed: int) -> None:
    source = random.Random(seed)
    length = source.choice([1, 2, 7, 32])
    min_length = source.choice([0, 1, length // 2, length])
    sizes = [0, 1, 2, min_length, min_length + 1, length, length + 1, length + 2, 2 * length, 2 * length + 1, 200]
    ids = iter(range(1_000_000))
    documents = [[next(ids) for _ in range(source.choice(sizes))] for _ in range(source.randint(0, 40))]
    pieces = []  # files of whole documents, some of them without any
    rest = documents
    while rest:
        cut = source.randint(0, 5)
        file, rest = rest[:cut], rest[cut:]
        flat = np.array([token for document in file for token in document], dtype=np.uint32)
        pieces.append((flat, np.array([len(document) for document in file], dtype=np.int64)))
    per_block = source.choice([1, 3, 4096])
    blocks = list(pack_windows(iter(pieces), length, min_length=min_length, rows_per_block=per_block))
    rows, dropped = naive_windows(documents, length, min_length)
    assert split_rows(blocks) == rows
    assert all(len(lengths) <= per_block and ids.dtype == np.uint32 for ids, lengths in blocks)
    first_ids = sum(1 for document in documents if document)
    assert sum(map(len, documents)) == first_ids + sum(len(row) - 1 for row in rows) + dropped


def test_windows_stay_inside_their_document() -> None:
    ids, lengths = np.arange(23, dtype=np.uint16), np.array([9, 0, 1, 13])
    rows = split_rows(list(pack_windows([(ids, lengths)], 8)))
    assert rows == [list(range(9)), list(range(10, 19)), list(range(18, 23))]
    assert split_rows(list(pack_windows([(ids, lengths)], 8, min_length=5))) == rows[:2]

"""Packing against a naive reference, and the properties it promises."""

import random

import numpy as np
import pytest

from gpt2_repro.data.packing import leftover_tokens, pack_rows


def naive_rows(pieces: list[list[int]], length: int) -> list[list[int]]:
    """Rows of length + 1 with stride length, one id at a time."""
    stream = [token for piece in pieces for token in piece]
    rows = []
    start = 0
    while start + length + 1 <= len(stream):
        rows.append(stream[start : start + length + 1])
        start += length
    return rows


@pytest.mark.parametrize("seed", range(20))
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
    assert leftover_tokens(sum(lengths), length) == sum(lengths) - (len(rows) * length + 1 if rows else 0)


def test_every_token_but_the_first_is_a_target_once() -> None:
    stream = np.arange(10 * 8 + 1, dtype=np.uint16)
    rows = np.concatenate(list(pack_rows([stream[:13], stream[13:]], 8)))
    assert rows.shape == (10, 9) and rows.dtype == np.uint16
    assert rows[:, 1:].ravel().tolist() == stream[1:].tolist()
    assert leftover_tokens(len(stream), 8) == 0

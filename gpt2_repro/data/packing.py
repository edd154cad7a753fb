"""Concatenate documents and cut them into rows. Pure: arrays in, arrays out."""

from collections.abc import Iterable, Iterator

import numpy as np


def pack_rows(
    pieces: Iterable[np.ndarray], sequence_length: int, *, rows_per_block: int = 4096
) -> Iterator[np.ndarray]:
    """Cut a stream of ids into rows of sequence_length + 1 with stride sequence_length.

    A row's last id is the next row's first: every id but the stream's first is a target once. Ids after the last
    full row are left over (see `leftover_tokens`).

    Args:
        pieces: arrays of ids [any length], in order.
        sequence_length: targets per row.
        rows_per_block: rows per yielded array, at most.

    Yields arrays [rows, sequence_length + 1] of the pieces' dtype.
    """
    held: list[np.ndarray] = []
    length = 0
    for piece in pieces:
        held.append(piece)
        length += len(piece)
        if length > rows_per_block * sequence_length:
            block, rest = _cut(np.concatenate(held), sequence_length)
            for start in range(0, len(block), rows_per_block):
                yield block[start : start + rows_per_block]
            held, length = [rest], len(rest)
    if held:
        block, _ = _cut(np.concatenate(held), sequence_length)
        for start in range(0, len(block), rows_per_block):
            yield block[start : start + rows_per_block]


def _cut(tokens: np.ndarray, sequence_length: int) -> tuple[np.ndarray, np.ndarray]:
    rows = max(0, len(tokens) - 1) // sequence_length
    if not rows:
        return np.empty((0, sequence_length + 1), tokens.dtype), tokens
    windows = np.lib.stride_tricks.sliding_window_view(tokens, sequence_length + 1)
    return windows[::sequence_length][:rows], tokens[rows * sequence_length :]


def leftover_tokens(tokens: int, sequence_length: int) -> int:
    """Tokens of a stream that no row holds."""
    rows = max(0, tokens - 1) // sequence_length
    return tokens - (rows * sequence_length + 1 if rows else 0)

"""Cut documents into rows, joined (concat) or each alone (wrap). Pure: arrays in, arrays out."""

from collections.abc import Iterable, Iterator

import numpy as np


def pack_rows(
    pieces: Iterable[np.ndarray], sequence_length: int, *, rows_per_block: int = 4096
) -> Iterator[np.ndarray]:
    """Cut a stream of ids into rows of sequence_length + 1 with stride sequence_length.

    A row's last id is the next row's first: every id but the stream's first is a target once. Ids after the last
    full row are left over.

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


def pack_windows(
    pieces: Iterable[tuple[np.ndarray, np.ndarray]],
    sequence_length: int,
    *,
    min_length: int = 0,
    rows_per_block: int = 4096,
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Cut each document alone into rows of at most sequence_length + 1 ids with stride sequence_length.

    A row's last id is the first of the same document's next row: every id but the document's first is a target once.
    A row with fewer targets than min_length, or with none, is dropped; only a document's last one can have so few.

    Args:
        pieces: ids of whole documents one after another [ids], and the length of each document [documents].
        sequence_length: targets of a row, at most.
        min_length: targets of a row, at least; not more than sequence_length.
        rows_per_block: rows of what is yielded, at most.

    Yields ids of rows one after another [ids], of the pieces' dtype, and the length of each row [rows].
    """
    held: list[tuple[np.ndarray, np.ndarray]] = []
    tokens = 0
    for piece in pieces:
        held.append(piece)
        tokens += len(piece[0])
        if tokens > rows_per_block * sequence_length:
            yield from _cut_windows(held, sequence_length, max(1, min_length), rows_per_block)
            held, tokens = [], 0
    if held:
        yield from _cut_windows(held, sequence_length, max(1, min_length), rows_per_block)


def _cut_windows(
    pieces: list[tuple[np.ndarray, np.ndarray]], sequence_length: int, min_targets: int, rows_per_block: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    ids, documents = (np.concatenate(arrays) if len(arrays) > 1 else arrays[0] for arrays in zip(*pieces, strict=True))
    targets = np.maximum(documents - 1, 0)
    rows = targets // sequence_length + (targets % sequence_length >= min_targets)
    # Of each row: its place among its document's rows, its first id, its length.
    place = np.arange(rows.sum()) - np.repeat(np.cumsum(rows) - rows, rows)
    starts = np.repeat(np.cumsum(documents) - documents, rows) + place * sequence_length
    lengths = np.minimum(np.repeat(targets, rows) - place * sequence_length, sequence_length) + 1
    for first in range(0, len(lengths), rows_per_block):
        start, length = (array[first : first + rows_per_block] for array in (starts, lengths))
        ends = np.cumsum(length)
        yield ids[np.arange(ends[-1]) + np.repeat(start - (ends - length), length)], length

"""Cut rows from the joined documents (concat) or from each document (wrap)."""

from collections.abc import Iterable, Iterator

import numpy as np


def pack_rows(
    pieces: Iterable[np.ndarray], sequence_length: int, *, rows_per_block: int = 4096
) -> Iterator[np.ndarray]:
    """Yield blocks of rows, cut from one sequence of token ids.

    The last id of a row is also the first id of the next row. Ids after the last full row are dropped.

    Args:
        pieces: the sequence, divided into arrays of any lengths.
        rows_per_block: number of rows in every yielded array except the last.

    Yields arrays of shape [rows, sequence_length + 1] with the dtype of the pieces.
    """
    held: list[np.ndarray] = []
    length = 0
    for piece in pieces:
        held.append(piece)
        length += len(piece)
        if length > rows_per_block * sequence_length:
            ids = np.concatenate(held)
            rows = (len(ids) - 1) // sequence_length // rows_per_block * rows_per_block
            block, rest = _cut(ids, sequence_length, rows)
            for start in range(0, rows, rows_per_block):
                yield block[start : start + rows_per_block]
            held, length = [rest], len(rest)
    if length > sequence_length:
        yield _cut(np.concatenate(held), sequence_length, (length - 1) // sequence_length)[0]


def _cut(tokens: np.ndarray, sequence_length: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    windows = np.lib.stride_tricks.sliding_window_view(tokens, sequence_length + 1)
    return windows[::sequence_length][:rows], tokens[rows * sequence_length :]


def pack_windows(
    pieces: Iterable[tuple[np.ndarray, np.ndarray]],
    sequence_length: int,
    *,
    min_length: int = 0,
    rows_per_block: int = 4096,
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield blocks of rows, cut from each document separately.

    A row has at most sequence_length + 1 ids. The last id of a row is also the first id of the document's next row.
    The last row of a document is dropped if it has fewer than max(1, min_length) targets (predicted ids).

    Args:
        pieces: pairs of arrays: the concatenated ids of complete documents, and the length of each document.
        rows_per_block: number of rows in every yielded block except the last.

    Yields pairs of arrays: the concatenated ids of rows, and the length of each row.
    """
    held: list[tuple[np.ndarray, np.ndarray]] = []
    rows = 0
    for ids, lengths in pieces:
        if not len(lengths):
            continue
        held.append(_cut_windows(ids, lengths, sequence_length, max(1, min_length)))
        rows += len(held[-1][1])
        if rows >= rows_per_block:
            ids, lengths = _join(held)
            whole = rows // rows_per_block * rows_per_block
            ends = np.concatenate([[0], np.cumsum(lengths)])
            for first in range(0, whole, rows_per_block):
                last = first + rows_per_block
                yield ids[ends[first] : ends[last]], lengths[first:last]
            held, rows = [(ids[ends[whole] :], lengths[whole:])], rows - whole
    if rows:
        yield _join(held)


def _join(pieces: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    ids, lengths = zip(*pieces, strict=True)
    return np.concatenate(ids), np.concatenate(lengths)


def _cut_windows(
    ids: np.ndarray, documents: np.ndarray, sequence_length: int, min_targets: int
) -> tuple[np.ndarray, np.ndarray]:
    targets = np.maximum(documents - 1, 0)
    rows = targets // sequence_length + (targets % sequence_length >= min_targets)
    # For each row: its index within its document, the position of its first id, its length.
    place = np.arange(rows.sum()) - np.repeat(np.cumsum(rows) - rows, rows)
    starts = np.repeat(np.cumsum(documents) - documents, rows) + place * sequence_length
    lengths = np.minimum(np.repeat(targets, rows) - place * sequence_length, sequence_length) + 1
    ends = np.cumsum(lengths)
    wanted = np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - (ends - lengths), lengths)
    return ids[wanted], lengths

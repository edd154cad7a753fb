"""Cut rows from the joined documents (concat) or from each document (wrap)."""

from collections.abc import Iterable, Iterator

import numpy as np


# Concatenated ids of rows or documents [ids], and the length of each [rows].
Block = tuple[np.ndarray, np.ndarray]


def pack_rows(pieces: Iterable[Block], sequence_length: int) -> Iterator[Block]:
    """Yield rows of sequence_length + 1 ids, cut from one sequence of token ids.

    The last id of a row is also the first id of the next row. Ids after the last full row are dropped.

    Args:
        pieces: the sequence, divided into documents or parts of documents.
    """
    rest = np.empty(0, np.uint16)
    for ids, _ in pieces:
        if len(rest):
            ids = np.concatenate([rest, ids])
        rows = max(0, len(ids) - 1) // sequence_length
        if rows:
            windows = np.lib.stride_tricks.sliding_window_view(ids, sequence_length + 1)[::sequence_length]
            yield windows[:rows].ravel(), np.full(rows, sequence_length + 1)
        rest = ids[rows * sequence_length :]


def pack_windows(pieces: Iterable[Block], sequence_length: int, *, min_length: int = 0) -> Iterator[Block]:
    """Yield rows, cut from each document separately.

    A row has at most sequence_length + 1 ids. The last id of a row is also the first id of the document's next row.
    The last row of a document is dropped if it has fewer than max(1, min_length) targets (predicted ids).

    Args:
        pieces: complete documents.
    """
    for ids, documents in pieces:
        # For each document: its targets, its rows, and the positions of its first id and its first row.
        targets = np.maximum(documents - 1, 0)
        has_last_row = targets % sequence_length >= max(1, min_length)
        rows = targets // sequence_length + has_last_row
        first_ids = np.cumsum(documents) - documents
        first_rows = np.cumsum(rows) - rows
        # For each row: its first target within its document, its first id, and its length.
        numbers = np.arange(rows.sum()) - np.repeat(first_rows, rows)  # of each row within its document
        first_targets = numbers * sequence_length
        starts = np.repeat(first_ids, rows) + first_targets
        lengths = np.minimum(np.repeat(targets, rows) - first_targets, sequence_length) + 1
        # For each id of the rows: its position in `ids`.
        shifts = starts - (np.cumsum(lengths) - lengths)
        positions = np.arange(lengths.sum()) + np.repeat(shifts, lengths)
        yield ids[positions], lengths


def in_blocks(pieces: Iterable[Block], rows_per_block: int) -> Iterator[Block]:
    """Join and divide pieces so that each has `rows_per_block` rows, except the last."""
    waiting: list[Block] = []
    rows = 0
    for piece in pieces:
        waiting.append(piece)
        rows += len(piece[1])
        if rows >= rows_per_block:
            ids, lengths = _join(waiting)
            ends = np.concatenate([[0], np.cumsum(lengths)])
            whole = rows // rows_per_block * rows_per_block
            for first in range(0, whole, rows_per_block):
                last = first + rows_per_block
                yield ids[ends[first] : ends[last]], lengths[first:last]
            waiting = [(ids[ends[whole] :], lengths[whole:])]
            rows -= whole
    if rows:
        yield _join(waiting)


def _join(pieces: list[Block]) -> Block:
    ids = np.concatenate([ids for ids, _ in pieces])
    lengths = np.concatenate([lengths for _, lengths in pieces])
    return ids, lengths

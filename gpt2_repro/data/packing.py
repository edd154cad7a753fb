"""Cut rows from the joined documents (concat) or from each document (wrap)."""

from collections.abc import Iterable, Iterator

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view


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
        targets = max(0, len(ids) - 1)
        rows = targets // sequence_length
        if rows:
            row_length = sequence_length + 1
            windows = sliding_window_view(ids, row_length)
            complete = windows[::sequence_length]
            ids_of_rows = complete[:rows].ravel()
            yield ids_of_rows, np.full(rows, row_length)
        start_of_rest = rows * sequence_length
        rest = ids[start_of_rest:]


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
        full_rows = targets // sequence_length
        remainder = targets % sequence_length
        has_last_row = remainder >= max(1, min_length)
        rows = full_rows + has_last_row
        first_ids = np.cumsum(documents) - documents
        first_rows = np.cumsum(rows) - rows
        # For each row: its first target within its document, its first id, and its length.
        row_numbers = np.arange(rows.sum())
        numbers = row_numbers - np.repeat(first_rows, rows)  # of each row within its document
        first_targets = numbers * sequence_length
        starts = np.repeat(first_ids, rows) + first_targets
        remaining = np.repeat(targets, rows) - first_targets
        lengths = np.minimum(remaining, sequence_length) + 1
        # For each id of the rows: its position in `ids`.
        places = np.cumsum(lengths) - lengths  # of the first id of each row among the ids of the rows
        shifts = starts - places
        positions = np.arange(lengths.sum()) + np.repeat(shifts, lengths)
        yield ids[positions], lengths


def count_targets(documents: np.ndarray, sequence_length: int, *, min_length: int = 0) -> int:
    """Return the number of targets in the rows of `pack_windows`, from the lengths of the documents."""
    targets = np.maximum(documents - 1, 0)
    in_last_row = targets % sequence_length
    is_dropped = in_last_row < max(1, min_length)
    dropped = in_last_row[is_dropped]
    return int(targets.sum() - dropped.sum())


def in_blocks(pieces: Iterable[Block], rows_per_block: int) -> Iterator[Block]:
    """Join and divide pieces so that each has `rows_per_block` rows, except the last."""
    waiting: list[Block] = []
    rows = 0
    for piece in pieces:
        _, lengths_of_piece = piece
        waiting.append(piece)
        rows += len(lengths_of_piece)
        if rows < rows_per_block:
            continue
        ids, lengths = _join(waiting)
        edges = np.concatenate([[0], np.cumsum(lengths)])
        first = 0
        while rows >= rows_per_block:
            last = first + rows_per_block
            start = edges[first]
            end = edges[last]
            yield ids[start:end], lengths[first:last]
            first = last
            rows -= rows_per_block
        start = edges[first]
        waiting = [(ids[start:], lengths[first:])]
    if rows:
        yield _join(waiting)


def _join(pieces: list[Block]) -> Block:
    ids = np.concatenate([ids for ids, _ in pieces])
    lengths = np.concatenate([lengths for _, lengths in pieces])
    return ids, lengths

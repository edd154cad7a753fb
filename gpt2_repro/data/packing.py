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
        ids = np.concatenate([rest, ids]) if len(rest) else ids
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
        targets = np.maximum(documents - 1, 0)
        rows = targets // sequence_length + (targets % sequence_length >= max(1, min_length))
        # For each row: its index within its document, the position of its first id, its length.
        offset = np.arange(rows.sum()) - np.repeat(np.cumsum(rows) - rows, rows)
        starts = np.repeat(np.cumsum(documents) - documents, rows) + offset * sequence_length
        lengths = np.minimum(np.repeat(targets, rows) - offset * sequence_length, sequence_length) + 1
        ends = np.cumsum(lengths)
        positions = np.arange(lengths.sum()) + np.repeat(starts - (ends - lengths), lengths)
        yield ids[positions], lengths


def in_blocks(pieces: Iterable[Block], rows_per_block: int) -> Iterator[Block]:
    """Join and divide pieces so that each has `rows_per_block` rows, except the last."""
    waiting: list[Block] = []
    rows = 0
    for piece in pieces:
        waiting.append(piece)
        rows += len(piece[1])
        if rows >= rows_per_block:
            ids, lengths = map(np.concatenate, zip(*waiting, strict=True))
            ends = np.concatenate([[0], np.cumsum(lengths)])
            whole = rows // rows_per_block * rows_per_block
            for first in range(0, whole, rows_per_block):
                last = first + rows_per_block
                yield ids[ends[first] : ends[last]], lengths[first:last]
            waiting, rows = [(ids[ends[whole] :], lengths[whole:])], rows - whole
    if rows:
        ids, lengths = map(np.concatenate, zip(*waiting, strict=True))
        yield ids, lengths

"""Cut the staged documents of one split into rows on disk, in one sequential pass."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from gpt2_repro.data.arguments import DataArguments
from gpt2_repro.data.packing import pack_rows, pack_windows
from gpt2_repro.data.preparation.order import DocumentSpan
from gpt2_repro.data.preparation.tokenizing import StagedPart
from gpt2_repro.data.rows import Block
from gpt2_repro.data.shards import WrittenRows, rows_per_block, write_rows


PIECE_TOKENS = 2**22  # tokens in memory at once


def cut_split(
    folder: Path,
    runs: Iterable[DocumentSpan],
    streams: Sequence[Sequence[StagedPart]],
    args: DataArguments,
    *,
    tokens: int,
    dtype: np.dtype[Any],
) -> WrittenRows:
    """Write the rows of a split to the new folder `folder`.

    Args:
        runs: documents of the split, in order.
        streams: staged parts that the runs refer to.
        tokens: number of tokens in `runs`, for the progress bar.
    """
    with tqdm(total=tokens, desc=f"pack {folder.name}", unit="tok", unit_scale=True) as bar:
        blocks = _blocks(_read(runs, streams, bar), args)
        row_length = args.sequence_length + 1 if args.packing == "concat" else None
        return write_rows(folder, blocks, dtype, row_length)


def _blocks(pieces: Iterator[Block], args: DataArguments) -> Iterator[Block]:
    """Yield the documents cut into rows."""
    per_block = rows_per_block(args.sequence_length)
    pieces = _short(pieces, args)
    if args.packing == "wrap":
        yield from pack_windows(pieces, args.sequence_length, min_length=args.min_length, rows_per_block=per_block)
        return
    for rows in pack_rows((ids for ids, _ in pieces), args.sequence_length, rows_per_block=per_block):
        yield rows.ravel(), np.full(len(rows), args.sequence_length + 1)


def _short(pieces: Iterator[Block], args: DataArguments) -> Iterator[Block]:
    """Split a document that is longer than a piece, such as a token file without separators. Its rows stay the same."""
    step = max(1, PIECE_TOKENS // args.sequence_length) * args.sequence_length
    shared = 1 if args.packing == "wrap" else 0  # a document's next row begins with the last id of the row before
    for ids, lengths in pieces:
        if len(lengths) > 1 or len(ids) <= step:
            yield ids, lengths
            continue
        for start in range(0, len(ids) - shared, step):
            part = ids[start : start + step + shared]
            yield part, np.array([len(part)])


def _read(runs: Iterable[DocumentSpan], streams: Sequence[Sequence[StagedPart]], bar: tqdm) -> Iterator[Block]:
    """Yield the ids of runs, a few million at a time, with the lengths of their documents."""
    opened: dict[int, tuple[int, np.ndarray]] = {}  # by stream: number and ids of the part that is being read
    for run in runs:
        if run.stream not in opened or opened[run.stream][0] != run.part:
            opened[run.stream] = run.part, streams[run.stream][run.part].ids()
        ids = opened[run.stream][1]
        ends = np.concatenate([[0], np.cumsum(run.lengths)])
        first = 0
        while first < len(run.lengths):
            last = int(np.searchsorted(ends, ends[first] + PIECE_TOKENS, side="right")) - 1
            last = max(last, first + 1)
            start, stop = run.first_token + ends[first], run.first_token + ends[last]
            yield ids[start:stop], run.lengths[first:last]
            bar.update(int(stop - start))
            first = last

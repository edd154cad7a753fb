"""One split of staged documents to rows on disk, from where an interrupted pass stopped."""

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from gpt2_repro.data.arguments import DataArguments
from gpt2_repro.data.packing import pack_rows, pack_windows, rows_of
from gpt2_repro.data.preparation.order import Run
from gpt2_repro.data.preparation.staged import StagedPart
from gpt2_repro.data.rows import Block
from gpt2_repro.data.shards import Shard, WrittenRows, rows_per_block, write_rows
from gpt2_repro.files import write_whole


PIECE_TOKENS = 2**22  # looked at once


class Journal:
    """The shards that are whole and on the disk, by split."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._shards = json.loads(path.read_text()) if path.is_file() else {}

    def shards(self, split: str) -> list[Shard]:
        return [Shard(**described) for described in self._shards.get(split, [])]

    def write(self, split: str, shards: list[Shard]) -> None:
        self._shards[split] = [dataclasses.asdict(shard) for shard in shards]
        write_whole(self._path, json.dumps(self._shards))


def cut_split(
    folder: Path,
    split: str,
    found: Callable[[], Iterator[Run]],
    streams: Sequence[Sequence[StagedPart]],
    args: DataArguments,
    journal: Journal,
    *,
    dtype: np.dtype[Any],
    last: bool,
) -> WrittenRows:
    """Write the rows of a split.

    Args:
        found: the documents of all splits, in order.
        streams: the parts that they are of.
        journal: keeps what is done.
        last: no other split needs the staged ids: their room is freed as soon as their rows are on the disk.
    """
    done = journal.shards(split)
    rows = sum(shard.rows for shard in done)
    reader = _Reader(streams)
    tokens, all_rows = _count((run for run in found() if run.split == split), args)
    # What fills no row behind the last one is not read again: its ids may be dropped.
    chosen = (run for run in found() if run.split == split and rows < all_rows)
    with tqdm(total=tokens, desc=f"pack {split}", unit="tok", unit_scale=True) as bar:
        pieces = reader.pieces(from_row(chosen, rows, args), bar)
        blocks = _blocks(pieces, args)

        def finished(shards: list[Shard]) -> None:
            journal.write(split, shards)
            if last:
                reader.drop_passed()

        row_length = args.sequence_length + 1 if args.packing == "concat" else None
        return write_rows(folder / split, split, blocks, dtype, row_length, done=done, finished=finished)


def _count(found: Iterator[Run], args: DataArguments) -> tuple[int, int]:
    """The tokens of a split and its rows."""
    tokens = rows = 0
    for run in found:
        tokens += run.tokens
        rows += int(rows_of(run.lengths, args.sequence_length, args.min_length).sum())
    return tokens, rows if args.packing == "wrap" else max(0, tokens - 1) // args.sequence_length


def from_row(found: Iterator[Run], rows: int, args: DataArguments) -> Iterator[Run]:
    """What is left of the documents behind the first so many rows."""
    left = rows * args.sequence_length if args.packing == "concat" else rows
    for run in found:
        units = (
            run.lengths if args.packing == "concat" else rows_of(run.lengths, args.sequence_length, args.min_length)
        )
        if left and left >= units.sum():
            left -= int(units.sum())
            continue
        if left:
            document = int(np.searchsorted(np.cumsum(units), left, side="right"))
            inside = left - int(units[:document].sum())
            skipped = inside if args.packing == "concat" else inside * args.sequence_length
            lengths = run.lengths[document:].copy()
            lengths[0] -= skipped
            first_token = run.first_token + int(run.lengths[:document].sum()) + skipped
            run = dataclasses.replace(
                run, first_document=run.first_document + document, first_token=first_token, lengths=lengths
            )
            left = 0
        yield run


def _blocks(pieces: Iterator[Block], args: DataArguments) -> Iterator[Block]:
    """The documents cut into rows."""
    per_block = rows_per_block(args.sequence_length)
    pieces = _short(pieces, args)
    if args.packing == "wrap":
        yield from pack_windows(pieces, args.sequence_length, min_length=args.min_length, rows_per_block=per_block)
        return
    for rows in pack_rows((ids for ids, _ in pieces), args.sequence_length, rows_per_block=per_block):
        yield rows.ravel(), np.full(len(rows), args.sequence_length + 1)


def _short(pieces: Iterator[Block], args: DataArguments) -> Iterator[Block]:
    """A document that is longer than a piece, as a file of tokens without separators is, in several of the same rows."""
    step = max(1, PIECE_TOKENS // args.sequence_length) * args.sequence_length
    shared = 1 if args.packing == "wrap" else 0  # a document's next row begins with the last id of the one before
    for ids, lengths in pieces:
        if len(lengths) > 1 or len(ids) <= step:
            yield ids, lengths
            continue
        for start in range(0, len(ids) - shared, step):
            part = ids[start : start + step + shared]
            yield part, np.array([len(part)])


class _Reader:
    """Reads the ids of runs, and knows which parts lie behind it."""

    def __init__(self, streams: Sequence[Sequence[StagedPart]]) -> None:
        self._streams = streams
        self._open: dict[int, tuple[int, np.ndarray]] = {}  # of each stream the part that is read
        self._dropped = [0] * len(streams)
        self._written = [0] * len(streams)  # parts of each stream whose rows are on the disk

    def pieces(self, found: Iterator[Run], bar: tqdm) -> Iterator[Block]:
        """The ids of runs, a few million at a time, with the lengths of their documents."""
        for run in found:
            number, ids = self._open.get(run.stream, (-1, np.empty(0)))
            if number != run.part:
                ids = self._streams[run.stream][run.part].ids()
                self._open[run.stream] = run.part, ids
            ends = np.concatenate([[0], np.cumsum(run.lengths)])
            first = 0
            while first < len(run.lengths):
                last = int(np.searchsorted(ends, ends[first] + PIECE_TOKENS, side="right")) - 1
                last = max(last, first + 1)
                start, stop = run.first_token + ends[first], run.first_token + ends[last]
                yield ids[start:stop], run.lengths[first:last]
                bar.update(int(stop - start))
                first = last

    def drop_passed(self) -> None:
        """Called after each shard: what was read before the last one is in it, for packing holds less than a shard."""
        for stream, parts in enumerate(self._streams):
            for part in parts[self._dropped[stream] : self._written[stream]]:
                part.drop_ids()
            self._dropped[stream] = self._written[stream]
            self._written[stream] = self._open[stream][0] if stream in self._open else self._written[stream]

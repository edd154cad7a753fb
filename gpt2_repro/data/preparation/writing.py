"""Cut the tokens of a split into rows, and write the rows to Arrow files.

The folder of the files has the format of the `datasets` library.
"""

import functools
import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from gpt2_repro.cli import Progress
from gpt2_repro.data.arguments import DataArguments
from gpt2_repro.data.packing import pack_rows, pack_windows
from gpt2_repro.data.preparation.splits import DocumentSpan
from gpt2_repro.data.preparation.tokenizing import StagedPart
from gpt2_repro.data.rows import Block
from gpt2_repro.files import sha256_of, sync, write_whole
from gpt2_repro.manifest import Shard


PIECE_TOKENS = 2**22  # tokens in memory at once
BLOCK_IDS = 2**25  # targets per record batch: 64 MiB at 2 bytes per id
SHARD_BLOCKS = 4  # record batches per file: 2**17 rows of 1,025 ids


def write_split(
    folder: Path,
    spans: Iterable[DocumentSpan],
    streams: Sequence[Sequence[StagedPart]],
    args: DataArguments,
    *,
    tokens: int,
    dtype: np.dtype[Any],
) -> list[Shard]:
    """Write the rows of a split to a new folder, and return a list of the files.

    Args:
        folder: folder to create; its name is the name of the split.
        spans: documents of the split in order.
        streams: for each source, the tokenized parts of its files.
        tokens: number of tokens of the split, for the progress bar.
    """
    length = args.sequence_length
    # Rows of each record batch except the last. This depends only on the recipe, so files are reproducible bit by bit.
    per_block = max(1, BLOCK_IDS // length)
    with Progress(total=tokens, desc=f"pack {folder.name}", unit="tok", unit_scale=True) as bar:
        pieces = _read(spans, streams, args, bar)
        if args.packing == "wrap":
            windows = pack_windows(pieces, length, min_length=args.min_length, rows_per_block=per_block)
            return write_rows(folder, windows, dtype, None)
        blocks = pack_rows((ids for ids, _ in pieces), length, rows_per_block=per_block)
        flat = ((rows.ravel(), np.full(len(rows), length + 1)) for rows in blocks)
        return write_rows(folder, flat, dtype, length + 1)


def _read(
    spans: Iterable[DocumentSpan], streams: Sequence[Sequence[StagedPart]], args: DataArguments, bar: Progress
) -> Iterator[Block]:
    """Yield the ids and lengths of documents, a few million ids at a time."""
    step = max(1, PIECE_TOKENS // args.sequence_length) * args.sequence_length
    shared = 1 if args.packing == "wrap" else 0  # the last id of a row is the first of the document's next row
    # Keep one part of each stream open: the one that is being read.
    ids_of = functools.lru_cache(maxsize=len(streams))(lambda stream, part: streams[stream][part].ids())
    for span in spans:
        ids = ids_of(span.stream, span.part)
        ends = span.first_token + np.concatenate([[0], np.cumsum(span.lengths)])
        first = 0
        while first < len(span.lengths):
            last = int(np.searchsorted(ends, ends[first] + PIECE_TOKENS, side="right")) - 1
            start, stop = ends[first], ends[max(last, first + 1)]
            if last > first + 1:
                yield ids[start:stop], span.lengths[first:last]
            else:  # a longer document is cut at the boundary of rows, so the rows stay the same
                for place in range(start, stop - shared, step):
                    piece = ids[place : min(place + step + shared, stop)]
                    yield piece, np.array([len(piece)])
            bar.update(int(stop - start))
            first = max(last, first + 1)


def write_rows(folder: Path, blocks: Iterable[Block], dtype: np.dtype[Any], row_length: int | None) -> list[Shard]:
    """Write the rows of a split to a new folder, and return a list of the files.

    The folder has the format of the `datasets` library.

    Args:
        folder: folder to create; its name is the name of the split.
        blocks: for each record batch, the concatenated ids and the lengths of its rows.
        row_length: number of ids of every row, or None if the rows have different lengths.
    """
    from datasets import Dataset, Features, List, Value, disable_progress_bars

    features = Features({"input_ids": List(Value(dtype.name), length=-1 if row_length is None else row_length)})
    # `datasets` writes the metadata of the folder. save_to_disk would need all rows as a dataset, so it is called with
    # a single row, whose file is then deleted.
    disable_progress_bars()
    Dataset.from_dict({"input_ids": [[0] * (row_length or 1)]}, features, split=folder.name).save_to_disk(folder)
    for path in folder.glob("*.arrow"):
        path.unlink()
    shards: list[Shard] = []
    remaining = iter(blocks)
    for block in remaining:
        of_shard = itertools.chain([block], itertools.islice(remaining, SHARD_BLOCKS - 1))
        shards.append(_write_shard(folder / f"data-{len(shards):05d}.arrow", of_shard, features.arrow_schema))
    state = folder / "state.json"
    described = json.loads(state.read_text(encoding="utf-8"))
    described["_data_files"] = [{"filename": shard.name} for shard in shards]
    described["_fingerprint"] = split_hash(shards)[:16]
    write_whole(state, json.dumps(described, indent=2))
    return shards


def split_hash(shards: Sequence[Shard]) -> str:
    """Return the sha256 of a split, computed from the hashes of its shards (files)."""
    return hashlib.sha256("".join(f"{shard.sha256}\n" for shard in shards).encode()).hexdigest()


def _write_shard(path: Path, blocks: Iterable[Block], schema: pa.Schema) -> Shard:
    rows = targets = largest = 0
    field = schema.field("input_ids")
    with path.open("wb") as file, pa.ipc.new_stream(file, schema) as writer:
        for ids, lengths in blocks:
            rows += len(lengths)
            targets += len(ids) - len(lengths)
            largest = max(largest, int(ids.max()))
            if pa.types.is_fixed_size_list(field.type):
                column = pa.FixedSizeListArray.from_arrays(pa.array(ids), field.type.list_size)
            else:
                ends = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())
                column = pa.ListArray.from_arrays(ends, pa.array(ids))
            writer.write_batch(pa.record_batch([column.cast(field.type)], schema=schema))
    sync(path)
    return Shard(path.name, rows, targets, largest, path.stat().st_size, sha256_of(path))

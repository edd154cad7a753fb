"""Write rows as a `datasets` folder, shard by shard."""

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from gpt2_repro.data.rows import Block
from gpt2_repro.files import sha256_of, sync, write_whole
from gpt2_repro.manifest import Shard


BLOCK_IDS = 2**25  # of a record batch: 64 MiB at 2 bytes
SHARD_BLOCKS = 4  # 2**17 rows of 1,025 ids


def rows_per_block(sequence_length: int) -> int:
    """Rows of every record batch but a split's last: a function of the recipe, so that the bytes are one too."""
    return max(1, BLOCK_IDS // sequence_length)


@dataclasses.dataclass(frozen=True)
class WrittenRows:
    """What a folder holds."""

    shards: list[Shard]

    @property
    def rows(self) -> int:
        return sum(shard.rows for shard in self.shards)

    @property
    def targets(self) -> int:
        return sum(shard.targets for shard in self.shards)

    @property
    def largest_id(self) -> int:
        return max((shard.largest_id for shard in self.shards), default=0)

    @property
    def sha256(self) -> str:
        """Of the shards' hashes, a line each: of the split as a whole."""
        return hashlib.sha256("".join(f"{shard.sha256}\n" for shard in self.shards).encode()).hexdigest()


def write_rows(folder: Path, blocks: Iterable[Block], dtype: np.dtype[Any], row_length: int | None) -> WrittenRows:
    """Write the rows of the split `folder.name` as a `datasets` folder.

    Args:
        blocks: one record batch each, SHARD_BLOCKS of them a file.
        row_length: ids of every row, None if the rows differ in length.
    """
    from datasets import Features, List, Value

    features = Features({"input_ids": List(Value(dtype.name), length=-1 if row_length is None else row_length)})
    _begin_folder(folder, features, row_length)
    shards: list[Shard] = []
    remaining = iter(blocks)
    for block in remaining:
        of_shard = itertools.chain([block], itertools.islice(remaining, SHARD_BLOCKS - 1))
        shards.append(_write_shard(folder, len(shards), of_shard, features.arrow_schema))
    written = WrittenRows(shards)
    state = folder / "state.json"
    described = json.loads(state.read_text())
    described["_data_files"] = [{"filename": shard.name} for shard in shards]
    described["_fingerprint"] = written.sha256[:16]
    write_whole(state, json.dumps(described, indent=2))
    return written


def _begin_folder(folder: Path, features: Any, row_length: int | None) -> None:
    """Let `datasets` write the description of a folder, without rows.

    save_to_disk would need all rows in another dataset first; so it gets one row, whose file is deleted.
    """
    from datasets import Dataset, disable_progress_bars

    disable_progress_bars()
    Dataset.from_dict({"input_ids": [[0] * (row_length or 1)]}, features, split=folder.name).save_to_disk(folder)
    for path in folder.glob("*.arrow"):
        path.unlink()


def _write_shard(folder: Path, number: int, blocks: Iterable[Block], schema: pa.Schema) -> Shard:
    path = folder / f"data-{number:05d}.arrow"
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

"""Rows on disk: a `datasets` folder written as a stream, read back, and verified."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from tqdm import tqdm

from gpt2_repro.data.packing import pack_rows
from gpt2_repro.errors import UserError
from gpt2_repro.files import write_whole


ROWS_PER_SHARD = 2**17  # 268 MB at 1,025 ids of 2 bytes


def write_rows(
    folder: Path, split: str, pieces: Iterator[np.ndarray], sequence_length: int, dtype: np.dtype[Any]
) -> tuple[int, str, int]:
    """Write rows as a `datasets` folder; return their number, the sha256 of their bytes and the largest id."""
    from datasets import Dataset, Features, List, Value, disable_progress_bars

    disable_progress_bars()
    features = Features({"input_ids": List(Value(dtype.name), length=sequence_length + 1)})
    # The library writes its own description of a folder with one row; the shards are then streamed beside it,
    # because save_to_disk would first need all rows in another dataset.
    Dataset.from_dict({"input_ids": [[0] * (sequence_length + 1)]}, features, split=split).save_to_disk(folder)
    for placeholder in folder.glob("*.arrow"):
        placeholder.unlink()
    schema = features.arrow_schema
    digest, largest, total = hashlib.sha256(), 0, 0
    shards: list[str] = []
    writer: pa.ipc.RecordBatchStreamWriter | None = None
    for block in pack_rows(pieces, sequence_length):
        if writer is None or total >= ROWS_PER_SHARD * len(shards):
            if writer is not None:
                writer.close()
            shards.append(f"data-{len(shards):05d}.arrow")
            writer = pa.ipc.new_stream(str(folder / shards[-1]), schema)
        flat = np.ascontiguousarray(block).ravel()
        digest.update(flat.tobytes())
        largest = max(largest, int(flat.max()))
        total += len(block)
        column = pa.FixedSizeListArray.from_arrays(pa.array(flat), sequence_length + 1)
        writer.write_table(pa.table([column.cast(schema.field("input_ids").type)], schema=schema))
    if writer is not None:
        writer.close()
    state = folder / "state.json"
    described = json.loads(state.read_text())
    described["_data_files"] = [{"filename": name} for name in shards]
    described["_fingerprint"] = digest.hexdigest()[:16]
    write_whole(state, json.dumps(described, indent=2))
    return total, digest.hexdigest(), largest


def read_rows(folder: Path) -> np.ndarray:
    from datasets import load_from_disk

    return load_from_disk(str(folder)).with_format("numpy")["input_ids"][:]


def verify(dataset_dir: str, manifest: dict[str, Any]) -> None:
    """Read every row again and compare it with the manifest. Raises UserError where they differ."""
    from datasets import load_from_disk

    dtype = np.dtype(f"uint{8 * manifest['bytes_per_token']}")
    for split, expected in manifest["sha256"].items():
        rows = load_from_disk(str(Path(dataset_dir, split))).with_format("numpy")
        digest = hashlib.sha256()
        for start in tqdm(range(0, len(rows), 4096), desc=f"verify {split}", unit="block"):
            # The library's numpy format widens every integer.
            digest.update(rows[start : start + 4096]["input_ids"].astype(dtype).tobytes())
        if digest.hexdigest() != expected:
            raise UserError(f"{dataset_dir}/{split} does not hold what its manifest says: prepare it anew")

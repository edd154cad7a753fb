"""Run a script of this repository without `datasets` and pyarrow.

    python benchmarks/numpy_rows.py train.py recipes/gpt2_124m.yaml --dataset_dir offline/data

The rows of the prepared folder are read with numpy. Each split must be a single Arrow file with a single record batch,
which holds up to 33M targets, and all its rows must have the same length.
"""

import json
import runpy
import sys
from pathlib import Path

import numpy as np


def read_ids(split: Path) -> np.ndarray:
    """Memory-map the rows of a split as an array of shape [rows, T + 1]."""
    manifest = json.loads((split.parent / "manifest.json").read_text(encoding="utf-8"))
    [shard], width = manifest["shards"][split.name], manifest["bytes_per_token"]
    shape = (shard["rows"], shard["targets"] // shard["rows"] + 1)
    # The file ends with the ids of the last record batch, padding to a multiple of 8 bytes, and an 8-byte end mark.
    size = width * shape[0] * shape[1]
    ids = np.memmap(split / shard["name"], f"<u{width}", "r", shard["bytes"] - 8 - size - -size % 8, shape)
    if (ids[1:, 0] != ids[:-1, -1]).any():  # each row begins with the last id of the previous row
        sys.exit(f"{split} has several record batches. Install datasets and pyarrow, or prepare less text.")
    return ids


def read_with_numpy() -> None:
    """Let this project read the rows of prepared folders with `read_ids`."""
    from gpt2_repro.data import rows

    class NumpyRows(rows.Rows):
        def __init__(self, ids: np.ndarray) -> None:
            self.ids, self._largest_id, self._starts = ids, None, np.array([0, len(ids)])
            self._chunks = [(ids.reshape(-1), range(0, ids.size + 1, ids.shape[1]))]

        def first(self, targets: int) -> "NumpyRows":
            return NumpyRows(self.ids[: -(-targets // (self.ids.shape[1] - 1)) or None])

    rows.open_rows = lambda folder, largest_id=None: NumpyRows(read_ids(folder))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    read_with_numpy()
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")

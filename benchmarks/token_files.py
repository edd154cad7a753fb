"""Write the rows of a prepared folder as token files of nanoGPT and llm.c."""

import pickle
from pathlib import Path

import numpy as np

from gpt2_repro.data.prepared import PreparedData


def write_token_files(prepared: Path, folder: Path, num_rows: int) -> None:
    """Write the first rows of the training split, for nanoGPT and llm.c."""
    data = PreparedData.read(prepared)
    rows = data.rows("train")
    chosen = rows[range(min(len(rows), num_rows))]["input_ids"]
    tokens = np.concatenate([row[:-1] for row in chosen]).astype(np.uint16)  # rows overlap by one token
    for name in ("train.bin", "val.bin"):
        tokens.tofile(folder / name)
    header = np.zeros(256, np.int32)
    header[:3] = 20240520, 1, len(tokens)  # the magic number and the version of llm.c's dev/data
    (folder / "llmc_000001.bin").write_bytes(header.tobytes() + tokens.tobytes())
    (folder / "log").mkdir(exist_ok=True)  # of llm.c
    if data.manifest.vocab_size < 50_257:  # nanoGPT has GPT-2's vocabulary by default
        (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": data.manifest.vocab_size}))

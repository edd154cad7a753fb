"""A prepared folder as llm.c's .bin shards."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tqdm import tqdm

from gpt2_repro.data.prepared import PreparedData
from gpt2_repro.data.rows import open_rows
from gpt2_repro.data.sources.token_files import write_shards
from gpt2_repro.errors import UserError


def export_llmc(data: PreparedData, folder: Path) -> list[Path]:
    """Write the tokens of both splits to a new folder as llm.c's shards, named as its own. Returns their paths.

    Raises UserError for rows that are no stream, ids that uint16 does not hold and a folder that is there.
    """
    if data.manifest.form.packing != "concat":
        raise UserError(f"{data.path} has packing wrap. llm.c reads one stream: prepare with --packing concat.")
    if data.manifest.bytes_per_token != 2:
        raise UserError(f"{data.path} has ids beyond 65,535, which llm.c's uint16 shards do not hold")
    if folder.exists():
        raise UserError(f"{folder} exists: name a new folder with --export_llmc")
    written = []
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
            partial = Path(scratch, folder.name)
            partial.mkdir()
            for split, name in (("validation", "val"), ("train", "train")):
                written += write_shards(partial, data.path.name, name, _stream(data.path / split))
            partial.rename(folder)
    except OSError as error:
        raise UserError(f"{folder} cannot be written ({error}): free some room or name another folder") from None
    return [folder / path.name for path in written]


def _stream(split: Path) -> Iterator[np.ndarray]:
    """The ids of a split: of each row all but the last, which begins the next one, and the last row's too."""
    last = np.empty(0, np.uint16)
    for ids, lengths in tqdm(list(open_rows(split).blocks()), desc=f"export {split.name}", unit="block"):
        block = ids.reshape(len(lengths), -1)
        yield block[:, :-1].ravel()
        last = block[-1, -1:]
    yield last

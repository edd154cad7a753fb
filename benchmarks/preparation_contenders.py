"""Prepare data with the methods of other projects, and count the written tokens.

    python -m benchmarks.preparation_contenders llmc JOB

JOB is a JSON object with the fields of `Job`. Each method was implemented again from its description.
"""

import dataclasses
import functools
import json
import multiprocessing
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np


END_OF_TEXT = 50_256
BLOG_LENGTH, BLOG_SHORTEST = 512, 256  # tokens per window, and the minimum to keep it
NANOGPT_BATCHES = 1024
LLMC_SHARD, LLMC_HEADER, LLMC_MAGIC, LLMC_VERSION = 100_000_000, 256, 20240520, 1  # SHARD in tokens, HEADER in int32s


@dataclasses.dataclass(frozen=True)
class Job:
    """Input files, tokenizer, output folder and number of processes of a preparation."""

    kind: str  # parquet or json, a format name of `datasets`
    files: list[str]
    tokenizer: str  # folder with GPT-2's tokenizer.json, vocab.json and merges.txt
    folder: str  # output folder of the finished data
    processes: int


def blog(job: Job) -> dict[str, int]:
    """Prepare data as in suzyahyah's blog post of 2025-07."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(job.tokenizer)
    tokenizer.pad_token = tokenizer.eos_token  # padding needs a token, and GPT-2 has no padding token

    def tokenize(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        encoded = tokenizer(
            batch["text"], truncation=True, max_length=BLOG_LENGTH, return_overflowing_tokens=True, padding="longest"
        )
        return {name: encoded[name] for name in ("input_ids", "attention_mask")}

    windows = load(job, num_proc=job.processes).map(
        tokenize, batched=True, num_proc=job.processes, remove_columns=["text"]
    )
    kept = windows.filter(lambda row: sum(row["attention_mask"]) >= BLOG_SHORTEST, num_proc=job.processes)
    kept.save_to_disk(job.folder)
    return {"windows": len(windows), "kept_windows": len(kept)}


def nanogpt(job: Job) -> dict[str, int]:
    """Prepare data as in nanoGPT's data/openwebtext/prepare.py."""
    splits = load(job, num_proc=job.processes).train_test_split(test_size=0.0005, seed=2357, shuffle=True)
    gpt2_encoding(job.tokenizer)  # load it before the fork, so that workers inherit it

    def tokenize(row: dict[str, str]) -> dict[str, Any]:
        ids = [*gpt2_encoding(job.tokenizer).encode_ordinary(row["text"]), END_OF_TEXT]
        return {"ids": ids, "len": len(ids)}

    tokens = splits.map(tokenize, remove_columns=["text"], num_proc=job.processes)
    Path(job.folder).mkdir(parents=True)
    for split, name in (("train", "train.bin"), ("test", "val.bin")):
        rows = tokens[split]
        total = int(np.sum(rows["len"], dtype=np.uint64))
        out = np.memmap(Path(job.folder, name), np.uint16, "w+", shape=(total,))
        batches, place = min(NANOGPT_BATCHES, len(rows)), 0
        for batch in range(batches):
            shard = rows.shard(num_shards=batches, index=batch, contiguous=True).with_format("numpy")
            ids = np.concatenate(shard["ids"][:])
            out[place : place + len(ids)] = ids
            place += len(ids)
        out.flush()
    return {}


def llmc(job: Job) -> dict[str, int]:
    """Prepare data as in llm.c's dev/data/fineweb.py."""
    rows = load(job, num_proc=None)
    gpt2_encoding(job.tokenizer)
    Path(job.folder).mkdir(parents=True)
    shard, filled, shards = np.empty(LLMC_SHARD, np.uint16), 0, 0
    with multiprocessing.get_context("fork").Pool(job.processes) as pool:
        for ids in pool.imap(functools.partial(_llmc_document, job.tokenizer), rows, chunksize=16):
            while len(ids):
                taken = ids[: LLMC_SHARD - filled]
                shard[filled : filled + len(taken)] = taken
                filled, ids = filled + len(taken), ids[len(taken) :]
                if filled == LLMC_SHARD:
                    _write_llmc_shard(job.folder, shards, shard)
                    filled, shards = 0, shards + 1
    if filled:
        _write_llmc_shard(job.folder, shards, shard[:filled])
    return {}


def _llmc_document(tokenizer: str, row: dict[str, str]) -> np.ndarray:
    ids = np.array([END_OF_TEXT, *gpt2_encoding(tokenizer).encode_ordinary(row["text"])])
    if not ((ids >= 0) & (ids < 2**16)).all():
        raise ValueError("A token id does not fit into uint16.")
    return ids.astype(np.uint16)


def _write_llmc_shard(folder: str, number: int, ids: np.ndarray) -> None:
    header = np.zeros(LLMC_HEADER, np.int32)
    header[:3] = LLMC_MAGIC, LLMC_VERSION, len(ids)
    with Path(folder, f"{'train' if number else 'val'}_{number:06d}.bin").open("wb") as file:
        file.write(header.tobytes())
        file.write(ids.tobytes())


def load(job: Job, *, num_proc: int | None) -> Any:
    """Load the files with the library `datasets`, which caches them on the disk."""
    from datasets import load_dataset

    return load_dataset(job.kind, data_files=job.files, split="train", num_proc=num_proc)


@functools.cache
def gpt2_encoding(tokenizer: str) -> Any:
    """Load tiktoken's GPT-2 encoding from the files in a folder, without network."""
    os.environ["TIKTOKEN_CACHE_DIR"] = ""  # do not copy local files to the temporary folder
    import tiktoken
    from tiktoken.load import data_gym_to_mergeable_bpe_ranks
    from tiktoken_ext.openai_public import r50k_pat_str

    merges, vocabulary = (str(Path(tokenizer, name)) for name in ("merges.txt", "vocab.json"))
    ranks = data_gym_to_mergeable_bpe_ranks(vocab_bpe_file=merges, encoder_json_file=vocabulary)
    special = {"<|endoftext|>": END_OF_TEXT}
    return tiktoken.Encoding("gpt2_local", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens=special)


def nanogpt_ids(folder: Path) -> dict[str, np.ndarray]:
    """Return the ids in nanoGPT's train.bin and val.bin as arrays of shape [tokens]."""
    return {name: np.memmap(folder / f"{name}.bin", np.uint16, "r") for name in ("train", "val")}


def llmc_ids(folder: Path) -> Iterator[np.ndarray]:
    """Yield the token ids of each llm.c shard as an array of shape [tokens].

    Raises ValueError if a shard does not match its header.
    """
    for path in sorted(folder.glob("*.bin"), key=lambda path: path.stem.rpartition("_")[2]):
        magic, version, count = np.fromfile(path, np.int32, 3).tolist()
        ids = np.fromfile(path, np.uint16, offset=LLMC_HEADER * 4)
        if (magic, version, count) != (LLMC_MAGIC, LLMC_VERSION, len(ids)):
            raise ValueError(f"{path} does not match its header.")
        yield ids


def blog_masks(folder: Path) -> Iterator[np.ndarray]:
    """Yield attention masks of many windows at a time: 1 for a token, 0 for padding."""
    from datasets import load_from_disk

    for batch in load_from_disk(str(folder)).data.to_batches():
        yield batch.column("attention_mask").flatten().to_numpy()


def count(name: str, folder: Path) -> dict[str, int]:
    """Count the text tokens and separators that a data preparation has written.

    Args:
        name: "ours" or a key of CONTENDERS.

    Returns:
        `text_tokens` and `separators`; also `dropped_tokens` for "ours" and `padding` for "blog".
    """
    if name == "ours":
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        keys = ("tokens", "empty_documents", "dropped_tokens")
        total = {key: sum(split[key] for split in manifest["counts"].values()) for key in keys}
        separators = manifest["read"]["documents"] - total["empty_documents"]  # a document may be cut between splits
        text = total["tokens"] - separators
        return {"text_tokens": text, "separators": separators, "dropped_tokens": total["dropped_tokens"]}
    if name == "blog":
        masks = [(len(mask), int(mask.sum())) for mask in blog_masks(folder)]
        text = sum(kept for _, kept in masks)
        return {"text_tokens": text, "separators": 0, "padding": sum(size for size, _ in masks) - text}
    pieces = list(nanogpt_ids(folder).values() if name == "nanogpt" else llmc_ids(folder))
    separators = sum(int((ids == END_OF_TEXT).sum()) for ids in pieces)
    return {"text_tokens": sum(map(len, pieces)) - separators, "separators": separators}


CONTENDERS = {"blog": blog, "nanogpt": nanogpt, "llmc": llmc}


if __name__ == "__main__":
    print(json.dumps(CONTENDERS[sys.argv[1]](Job(**json.loads(sys.argv[2])))))

"""Tokenize a source file by file into staged token files, in parallel, keeping what is already finished."""

import concurrent.futures
import contextlib
import hashlib
import multiprocessing
import os
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from gpt2_repro.data.arguments import DataArguments
from gpt2_repro.data.files import SourceFile
from gpt2_repro.data.tokenizer import Encoder


def is_held_out(document: str, args: DataArguments) -> bool:
    """Whether the split `hash` puts a document into validation: a function of its text and split_seed alone."""
    digest = hashlib.blake2b(document.encode(), digest_size=8, key=args.split_seed.to_bytes(8, "little")).digest()
    return int.from_bytes(digest, "little") < args.validation_fraction * 2**64


class StagedFile:
    """The tokens of one source file: ids, the length of each document, and whether the split hash holds it out."""

    def __init__(self, staging: Path, index: int) -> None:
        self.path = staging / f"tokens-{index:05d}.npz"

    def exists(self) -> bool:
        return self.path.is_file()

    def write(self, ids: list[np.ndarray], held_out: list[bool], dtype: np.dtype[Any]) -> None:
        """Write the file whole and rename it into place."""
        partial = self.path.with_suffix(".partial")
        with partial.open("wb") as file:
            np.savez(
                file,
                ids=np.concatenate(ids) if ids else np.empty(0, dtype),
                lengths=np.array([len(document) for document in ids], dtype=np.int64),
                held_out=np.array(held_out, dtype=bool),
            )
        os.replace(partial, self.path)

    def ids(self) -> np.ndarray:
        """[tokens]"""
        return self._read("ids")

    def lengths(self) -> np.ndarray:
        """[documents], in tokens with their separators"""
        return self._read("lengths")

    def held_out(self) -> np.ndarray:
        """[documents], whether the split `hash` puts them into validation"""
        return self._read("held_out")

    def _read(self, name: str) -> np.ndarray:
        with np.load(self.path) as arrays:  # which reads only the array that is asked for
            return arrays[name]


def tokenize_file(
    file: SourceFile, staged: StagedFile, tokenizer: Path, args: DataArguments, report: Callable[[float], Any]
) -> int:
    """Tokenize one file, stopping after `max_tokens` of its own; `report` gets the share read since the last call."""
    encoder = Encoder(tokenizer, separator=args.separator)
    ids: list[np.ndarray] = []
    held_out: list[bool] = []
    tokens, done = 0, 0.0
    for documents, share in file.read():
        encoded = encoder.encode(documents)
        ids += encoded
        held_out += [args.split == "hash" and is_held_out(document, args) for document in documents]
        tokens += sum(map(len, encoded))
        report(share - done)
        done = share
        if args.max_tokens and tokens >= args.max_tokens:
            break
    staged.write(ids, held_out, encoder.dtype)
    report(1.0 - done)
    return tokens


def tokenize_files(
    files: list[SourceFile], staging: Path, tokenizer: Path, args: DataArguments, *, num_proc: int
) -> list[StagedFile]:
    """Stage the files that are not staged yet, with a progress bar. Stops early once max_tokens are there."""
    staged = [StagedFile(staging, index) for index in range(len(files))]
    needed: list[StagedFile] = []
    total = 0
    bar_format = "{desc}: {percentage:3.0f}%|{bar}| {n:.1f}/{total} files [{elapsed}<{remaining}]"
    with tqdm(total=len(files), desc="tokenize", bar_format=bar_format) as bar:
        with contextlib.closing(_in_order(files, staged, tokenizer, args, num_proc, bar.update)) as finished:
            for place, count in finished:
                needed.append(place)
                total += count
                if args.max_tokens and total >= args.max_tokens:
                    break
        bar.update(bar.total - bar.n)
    return needed


def _in_order(
    files: list[SourceFile],
    staged: list[StagedFile],
    tokenizer: Path,
    args: DataArguments,
    num_proc: int,
    report: Callable[[float], Any],
) -> Generator[tuple[StagedFile, int]]:
    """Staged files with their token counts, in the order of the source, whatever finishes first."""
    if num_proc == 1 or len(files) == 1:
        for file, place in zip(files, staged, strict=True):
            if place.exists():
                report(1.0)
                yield place, int(place.lengths().sum())
            else:
                yield place, tokenize_file(file, place, tokenizer, args, report)
        return
    # Spawned, not forked: a fork copies the locks of the tokenizer's threads as they happen to be.
    pool = concurrent.futures.ProcessPoolExecutor(num_proc, mp_context=multiprocessing.get_context("spawn"))
    try:
        pending = [
            None if place.exists() else pool.submit(tokenize_file, file, place, tokenizer, args, _silent)
            for file, place in zip(files, staged, strict=True)
        ]
        for place, future in zip(staged, pending, strict=True):
            count = int(place.lengths().sum()) if future is None else future.result()
            report(1.0)
            yield place, count
    finally:
        # Enough tokens, an error or Ctrl-C: files that no worker has begun are left alone.
        pool.shutdown(cancel_futures=True)


def _silent(share: float) -> None:
    pass

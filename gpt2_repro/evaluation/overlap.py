"""Find the documents of evaluation tasks that share 13 tokens in a row with training data."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpt2_repro.cli import Progress


LENGTH = 13  # tokens, as GPT-3's overlaps have 13 words (arXiv:2005.14165, appendix C)
FACTOR = np.uint64(0x9E3779B97F4A7C15)  # odd; joins the hashes of shorter runs, modulo 2**64
BITS = 26  # of a hash; with them, a table finds the few training hashes that may be wanted
PIECE = 1 << 14  # training tokens that are hashed at once, so that they stay in the processor's cache
NONE = np.empty(0, np.uint64)


def hashes_of(ids: NDArray[Any]) -> NDArray[np.uint64]:
    """Return the hash of each run of LENGTH ids, of shape [len(ids) - LENGTH + 1]."""
    count = len(ids) - LENGTH + 1
    if count < 1:
        return NONE
    one = ids.astype(np.uint64) + np.uint64(1)
    # Runs of 2, 4, 8 and 12 ids are each joined from two shorter runs.
    two = one[:-1] * FACTOR + one[1:]
    four = two[:-2] * FACTOR + two[2:]
    eight = four[:-4] * FACTOR + four[4:]
    return (eight[:count] * FACTOR + four[8 : 8 + count]) * FACTOR + one[12:]


def find_overlaps(
    documents: Mapping[str, Sequence[Sequence[int]]], rows: Iterable[NDArray[Any]], *, total: int | None = None
) -> set[str]:
    """Return the names of the documents with a run of LENGTH ids that also occurs in training rows.

    Args:
        documents: for each document, the ids of its texts.
        rows: arrays of training ids, one in memory at a time. Runs across two arrays are not found.
        total: the number of training ids, for the progress bar.
    """
    names = [name for name, texts in documents.items() for _ in texts]
    runs = [hashes_of(np.asarray(ids)) for texts in documents.values() for ids in texts]
    hashes, owners = np.concatenate([NONE, *runs]), np.repeat(np.arange(len(runs)), [len(run) for run in runs])
    table = np.zeros(1 << BITS, bool)
    table[_place(hashes)] = True
    seen = [NONE]
    with Progress(
        desc="overlap of the tasks with the training data", unit="token", total=total, unit_scale=True
    ) as bar:
        for ids in rows:
            for start in range(0, len(ids), PIECE):
                part = hashes_of(ids[start : start + PIECE + LENGTH - 1])
                seen.append(part[table[_place(part)]])
            bar.update(len(ids))
    return {names[owner] for owner in np.unique(owners[np.isin(hashes, np.concatenate(seen))])}


def _place(hashes: NDArray[np.uint64]) -> NDArray[np.int64]:
    return (hashes >> np.uint64(64 - BITS)).astype(np.int64)

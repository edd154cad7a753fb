"""Choose the order in which training reads rows, and collate rows into batches."""

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Sampler

from gpt2_repro.tokens import IGNORED


def collate_rows(
    rows: Sequence[dict[str, np.ndarray]], *, num_rows: int | None = None, length: int | None = None
) -> dict[str, Tensor]:
    """Collate rows of token ids into int64 tensors of shape [rows, T].

    A row has up to T + 1 ids. `input_ids` is ids[:-1]. `labels` and `shift_labels` are the same tensor, ids[1:].
    Shorter rows are padded at the end with the id 0 and the label -100.

    Args:
        num_rows: number of rows in the batch (default: len(rows)). Extra rows contain only padding.
        length: T (default: one less than the length of the longest row).
    """
    if num_rows is None:
        num_rows = len(rows)
    if length is None:
        longest = max(len(row["input_ids"]) for row in rows)
        length = longest - 1
    shape = (num_rows, length)
    inputs = np.zeros(shape, np.int64)
    targets = np.full(shape, IGNORED, np.int64)
    for number, row in enumerate(rows):
        ids = row["input_ids"]
        count = len(ids) - 1
        inputs[number, :count] = ids[:-1]
        targets[number, :count] = ids[1:]
    labels = torch.from_numpy(targets)
    # The Trainer expects `labels`. There is no attention_mask: attention is causal, so padding does not influence any
    # target, and with a mask the flash attention kernel could not be used.
    return {
        "input_ids": torch.from_numpy(inputs),
        "labels": labels,
        "shift_labels": labels,
    }


class EpochSampler(Sampler[int]):
    """Sampler that yields row numbers in an order that depends only on seed and epoch.

    Rows after the last complete step are dropped, so every step has `rows_per_step` rows.
    """

    # Blocks of rows adjacent on disk are shuffled first, then the rows of many successive blocks (a window) together.
    # Single rows in random order would be slow: a disk reads 128 KiB or more per uncached position, a row has 2 KiB.
    BLOCK = 64  # rows: 128 KiB at 1,025 ids of 2 bytes
    WINDOW = 2**15  # rows: 64 MiB

    def __init__(self, num_rows: int, *, rows_per_step: int, seed: int, shuffle: bool) -> None:
        self.num_rows = num_rows
        self.rows_per_step = rows_per_step
        self.seed = seed
        self.shuffle = shuffle
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        steps = self.num_rows // self.rows_per_step
        return steps * self.rows_per_step

    def __iter__(self) -> Iterator[int]:
        lists = (window.tolist() for window in self.windows())
        rows = itertools.chain.from_iterable(lists)
        return itertools.islice(rows, len(self))

    def windows(self) -> Iterator[np.ndarray]:
        """Yield the row numbers of the epoch in reading order, at most `WINDOW` per array.

        Rows after the last complete step are included.
        """
        rng = np.random.default_rng([self.seed, self.epoch])
        num_blocks = math.ceil(self.num_rows / self.BLOCK)
        blocks = np.arange(num_blocks)
        if self.shuffle:
            blocks = rng.permutation(blocks)
        per_window = self.WINDOW // self.BLOCK
        for start in range(0, num_blocks, per_window):
            window = blocks[start : start + per_window]
            first_rows = window * self.BLOCK
            rows = np.add.outer(first_rows, np.arange(self.BLOCK)).ravel()
            rows = rows[rows < self.num_rows]
            if self.shuffle:
                rows = rng.permutation(rows)
            yield rows

"""Rows to batches, and the order in which a run reads them."""

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Sampler

from gpt2_repro.batch_plan import IGNORED


def collate_rows(
    rows: Sequence[dict[str, np.ndarray]], *, num_rows: int | None = None, length: int | None = None
) -> dict[str, Tensor]:
    """Rows of up to T + 1 ids become `input_ids` [rows, T] and the same labels under two names [rows, T].

    Shorter rows are padded behind their end, with the id 0 and the label -100. Trainer counts targets and evaluates
    only where there are `labels`; the loss leaves them unshifted only as `shift_labels`. No attention_mask: attention
    is causal, so no target sees the padding behind it, and a mask would cost the flash kernel.

    Args:
        num_rows: of the batch, where it has to be more than there are.
        length: T, where it has to be more than the longest row has.
    """
    ids = [row["input_ids"] for row in rows]
    lengths = [len(row) for row in ids]
    shape = (num_rows or len(ids), length or max(lengths) - 1)
    if shape[0] == len(ids) and min(lengths) == max(lengths) == shape[1] + 1:
        table = np.stack(ids)  # narrow, and widened once for each of the two
        inputs, targets = table[:, :-1].astype(np.int64), table[:, 1:].astype(np.int64)
    else:
        inputs, targets = np.zeros(shape, np.int64), np.full(shape, IGNORED, np.int64)
        for place, (row, ids_of_row) in enumerate(zip(ids, lengths, strict=True)):
            inputs[place, : ids_of_row - 1] = row[:-1]
            targets[place, : ids_of_row - 1] = row[1:]
    labels = torch.from_numpy(targets)
    return {"input_ids": torch.from_numpy(inputs), "labels": labels, "shift_labels": labels}


class EpochSampler(Sampler[int]):
    """The rows of an epoch in an order that is a function of the seed and the epoch alone.

    Shuffled twice: blocks of rows that lie together on the disk, then the rows inside a window of many blocks. A plain
    permutation would read 2 KiB here and there, and a cold disk reads 128 KiB or more for each; a folder of up to one
    window's rows is permuted as a whole. Rows that do not fill the last step are dropped, other ones in each epoch, so
    that every step has the same number of tokens.
    """

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
        return self.num_rows // self.rows_per_step * self.rows_per_step

    def __iter__(self) -> Iterator[int]:
        return itertools.islice((row for window in self.windows() for row in window.tolist()), len(self))

    def windows(self) -> Iterator[np.ndarray]:
        """All rows of the epoch in its order, those that fill no step too, one window at a time."""
        if not self.shuffle:
            for start in range(0, self.num_rows, self.WINDOW):
                yield np.arange(start, min(start + self.WINDOW, self.num_rows))
            return
        source = np.random.default_rng([self.seed, self.epoch])
        blocks = source.permutation(-(-self.num_rows // self.BLOCK))
        per_window = self.WINDOW // self.BLOCK
        for start in range(0, len(blocks), per_window):
            firsts = blocks[start : start + per_window, None] * self.BLOCK
            rows = (firsts + np.arange(self.BLOCK)).ravel()
            yield source.permutation(rows[rows < self.num_rows])

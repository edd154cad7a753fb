"""Rows to batches, and the order in which a run reads them."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Sampler


def collate_rows(rows: Sequence[dict[str, np.ndarray]]) -> dict[str, Tensor]:
    """Rows of T + 1 ids become `input_ids` [rows, T] and the same labels under two names [rows, T].

    Trainer counts targets and evaluates only where there are `labels`; the loss leaves them unshifted only as
    `shift_labels`. No attention_mask: every row is full, and a mask would cost the flash kernel.
    """
    ids = torch.from_numpy(np.stack([row["input_ids"] for row in rows]).astype(np.int64))
    labels = ids[:, 1:].contiguous()
    return {"input_ids": ids[:, :-1].contiguous(), "labels": labels, "shift_labels": labels}


class EpochSampler(Sampler[int]):
    """The rows of an epoch in an order that is a function of the seed and the epoch alone.

    Rows that do not fill the last step of the epoch are dropped, other ones in each epoch, so that every step has
    the same number of tokens.
    """

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
        if not self.shuffle:
            return iter(range(len(self)))
        order = np.random.default_rng([self.seed, self.epoch]).permutation(self.num_rows)
        return iter(order[: len(self)].tolist())

"""Choose the order in which training reads rows, and collate rows into batches."""

import bisect
import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Sampler

from gpt2_repro.batch_plan import IGNORED, BatchPlan


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
    ids = [row["input_ids"] for row in rows]
    shape = (num_rows or len(ids), length or max(map(len, ids)) - 1)
    inputs, targets = np.zeros(shape, np.int64), np.full(shape, IGNORED, np.int64)
    for number, row in enumerate(ids):
        inputs[number, : len(row) - 1], targets[number, : len(row) - 1] = row[:-1], row[1:]
    labels = torch.from_numpy(targets)
    # The Trainer expects `labels`. There is no attention_mask: attention is causal, so padding does not influence any
    # target, and with a mask the flash attention kernel could not be used.
    return {"input_ids": torch.from_numpy(inputs), "labels": labels, "shift_labels": labels}


class EpochSampler(Sampler[int]):
    """Sampler that yields row numbers in an order that depends only on seed and epoch.

    Rows after the last complete step are dropped, so every step has `rows_per_step` rows.
    """

    # Blocks of rows adjacent on disk are shuffled first, then the rows of many successive blocks (a window) together.
    # Single rows in random order would be slow: a disk reads 128 KiB or more per uncached position, a row has 2 KiB.
    BLOCK = 64  # rows: 128 KiB at 1,025 ids of 2 bytes
    WINDOW = 2**15  # rows: 64 MiB

    def __init__(self, num_rows: int, *, rows_per_step: int, seed: int, shuffle: bool) -> None:
        self.num_rows, self.rows_per_step = num_rows, rows_per_step
        self.seed, self.shuffle, self.epoch = seed, shuffle, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.num_rows // self.rows_per_step * self.rows_per_step

    def __iter__(self) -> Iterator[int]:
        return itertools.islice((row for window in self.windows() for row in window.tolist()), len(self))

    def windows(self) -> Iterator[np.ndarray]:
        """Yield the row numbers of the epoch in reading order, at most `WINDOW` per array.

        Rows after the last complete step are included.
        """
        order = np.random.default_rng([self.seed, self.epoch]).permutation if self.shuffle else np.asarray
        blocks = order(np.arange(-(-self.num_rows // self.BLOCK)))
        per_window = self.WINDOW // self.BLOCK
        for start in range(0, len(blocks), per_window):
            rows = (blocks[start : start + per_window, None] * self.BLOCK + np.arange(self.BLOCK)).ravel()
            yield order(rows[rows < self.num_rows])


class LengthGroupedBatches(Sampler[list[int]]):
    """Batch sampler that puts rows of similar length into the same batch.

    Yields lists of row numbers: `plan.passes_per_step` lists for each optimizer step. Every step has about
    `plan.tokens_per_step` targets (predicted ids). Rows after the last complete step are dropped.

    Args:
        targets: array of shape [rows] with the number of targets of each row.
        plan: batch plan returned by `batch_plan.plan_by_length`.
    """

    def __init__(self, targets: np.ndarray, plan: BatchPlan, *, seed: int) -> None:
        self.targets, self.plan = targets.astype(np.uint32), plan
        self.steps_per_epoch = int(targets.sum(dtype=np.int64)) // plan.tokens_per_step
        self.order = EpochSampler(len(targets), rows_per_step=1, seed=seed, shuffle=True)

    def set_epoch(self, epoch: int) -> None:
        self.order.set_epoch(epoch)

    def __len__(self) -> int:
        return self.steps_per_epoch * self.plan.passes_per_step

    def __iter__(self) -> Iterator[list[int]]:
        order = np.concatenate([*self.order.windows()])
        firsts = np.cumsum(self.targets[order], dtype=np.int64) - self.targets[order]
        # A row belongs to the step of its first target. So the rows of a step do not depend on the number of batches.
        begins = np.arange(1, self.steps_per_epoch + 1) * self.plan.tokens_per_step
        for rows in np.split(order, np.searchsorted(firsts, begins))[: self.steps_per_epoch]:
            # Neighbouring batches get rows of similar length, so ranks that take one batch each have similar work.
            lengths = self.targets[rows]
            longest_first = np.argsort(lengths, kind="stable")[::-1]
            sizes = self.plan.passes_per_step, self.plan.positions_per_pass  # including padding
            ends = cut_by_length(lengths[longest_first].tolist(), *sizes)
            numbers = rows[longest_first].tolist()
            for start, end in itertools.pairwise([0, *ends]):
                yield numbers[start:end]


def cut_by_length(lengths: Sequence[int], num_batches: int, max_positions: int) -> list[int]:
    """Divide sorted rows into batches, and return the index at which each batch ends.

    The largest batch has as few positions as possible. Raises ValueError if the rows do not fit into the batches.

    Args:
        lengths: number of targets of each row; the longest row comes first.
        max_positions: maximum size of a batch: its number of rows times the length of its longest row.
    """
    # Find the smallest batch size, in positions, for which greedy filling needs at most num_batches. No other way to
    # cut the rows needs fewer batches of that size.
    sizes = range(max(lengths[0], -(-sum(lengths) // num_batches)), max_positions + 1)
    smallest = bisect.bisect_left(sizes, True, key=lambda positions: len(_fill(lengths, positions)) <= num_batches)
    if smallest == len(sizes) or len(lengths) < num_batches:
        raise ValueError(f"{len(lengths)} rows do not fit into {num_batches} batches of {max_positions} positions.")
    ends = _fill(lengths, sizes[smallest])
    while len(ends) < num_batches:
        batches = [(start, end) for start, end in itertools.pairwise([0, *ends]) if end - start > 1]
        _, start, end = max((lengths[start] * (end - start), start, end) for start, end in batches)
        ends = sorted([*ends, (start + end) // 2])
    return ends


def _fill(lengths: Sequence[int], positions: int) -> list[int]:
    """Fill batches of `positions` positions with rows in order.

    Returns the index at which each batch ends. `positions` includes padding.
    """
    ends = [0]
    while ends[-1] < len(lengths):
        ends.append(min(ends[-1] + positions // lengths[ends[-1]], len(lengths)))
    return ends[1:]

"""The order in which a run reads rows, and rows as batches."""

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
    """Collate rows of up to T + 1 ids into input_ids = ids[:-1] and shift_labels = ids[1:], int64 [rows, T].

    Shorter rows are padded at their end, with the id 0 and the label -100. `labels` is the same tensor under the name
    that stock Trainer code expects. No attention_mask: attention is causal, so no target sees the padding, and a mask
    would cost the flash kernel.

    Args:
        num_rows: of the batch, if it must have more than `rows`.
        length: T, if it must be longer than the longest row.
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
    window's rows is permuted as a whole. Rows that do not fill the last step are dropped (other ones in each epoch, if
    shuffled), so that every step has the same number of tokens.
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


class LengthGroupedBatches(Sampler[list[int]]):
    """The batches of an epoch: row numbers, `batches_per_step` lists for each optimizer step.

    The rows of an epoch stand in the order of `EpochSampler`. Step i has those whose first target lies in
    [i * B, (i + 1) * B) of all targets in that order, B = tokens_per_step: any rows as they come, with B targets, give or
    take one row's, and the same ones for any number of batches. Only inside a step are rows sorted by length, longest
    first, and cut; neighbouring batches have rows of like length, so processes that take one each have like work.
    Targets after the last whole step are dropped, other ones in each epoch.

    Args:
        targets: of each row [rows].
        plan: with as many passes per step as always suffice, see `batch_plan.passes_by_length`.
    """

    def __init__(self, targets: np.ndarray, plan: BatchPlan, *, seed: int) -> None:
        self.targets = targets.astype(np.uint32)
        self.tokens_per_step, self.batches_per_step = plan.tokens_per_step, plan.passes_per_step
        self.max_positions = plan.positions_per_pass  # of a batch, padding included
        self.steps_per_epoch = int(targets.sum(dtype=np.int64)) // plan.tokens_per_step
        self.order = EpochSampler(len(targets), rows_per_step=1, seed=seed, shuffle=True)

    def set_epoch(self, epoch: int) -> None:
        self.order.set_epoch(epoch)

    def __len__(self) -> int:
        return self.steps_per_epoch * self.batches_per_step

    def __iter__(self) -> Iterator[list[int]]:
        for rows in self.steps():
            lengths = self.targets[rows]
            longest_first = np.argsort(lengths, kind="stable")[::-1]
            ends = cut_by_length(lengths[longest_first].tolist(), self.batches_per_step, self.max_positions)
            numbers = rows[longest_first].tolist()
            for start, end in itertools.pairwise([0, *ends]):
                yield numbers[start:end]

    def steps(self) -> Iterator[np.ndarray]:
        """The rows of each whole step of the epoch [rows of the step], in the order of the epoch."""
        return itertools.islice(self._steps(), self.steps_per_epoch)

    def _steps(self) -> Iterator[np.ndarray]:
        step, before = 0, 0  # the step that is being gathered, and the targets in front of the window
        held: list[np.ndarray] = []
        for rows in self.order.windows():
            lengths = self.targets[rows].astype(np.int64)
            firsts = before + np.cumsum(lengths) - lengths
            last = int(firsts[-1]) // self.tokens_per_step
            begins = np.arange(step + 1, last + 1) * self.tokens_per_step
            *whole, rest = np.split(rows, np.searchsorted(firsts, begins))
            for part in whole:
                yield np.concatenate([*held, part])
                held = []
            held.append(rest)
            step, before = last, int(firsts[-1] + lengths[-1])
        yield np.concatenate(held)


def cut_by_length(lengths: Sequence[int], num_batches: int, max_positions: int) -> list[int]:
    """Cut rows that are sorted by length, longest first, into batches; returns where each ends.

    A batch has its number of rows times its longest row as positions. The most positions of a batch are as few as can
    be, and at most `max_positions`. Raises ValueError where there are fewer rows than batches, or more positions.
    """
    if len(lengths) < num_batches:
        raise ValueError(f"{len(lengths)} rows do not make {num_batches} batches")
    if len(_fill(lengths, max_positions, num_batches)) > num_batches:
        raise ValueError(f"{len(lengths)} rows do not go into {num_batches} batches of {max_positions} positions")
    # The fewest positions for which filling batch after batch takes no more than num_batches: it takes the least.
    positions = range(max(lengths[0], -(-sum(lengths) // num_batches)), max_positions)
    place = bisect.bisect_left(
        positions, True, key=lambda middle: len(_fill(lengths, middle, num_batches)) <= num_batches
    )
    ends = _fill(lengths, positions.start + place, num_batches)
    while len(ends) < num_batches:
        batches = [(start, end) for start, end in itertools.pairwise([0, *ends]) if end - start > 1]
        _, start, end = max((lengths[start] * (end - start), start, end) for start, end in batches)
        ends = sorted([*ends, (start + end) // 2])
    return ends


def _fill(lengths: Sequence[int], positions: int, num_batches: int) -> list[int]:
    """Where full batches end; filling stops at one batch more than `num_batches`."""
    ends: list[int] = []
    end = 0
    while end < len(lengths) and len(ends) <= num_batches:
        rows = positions // lengths[end]
        if not rows:
            raise ValueError(f"a row of {lengths[end]} targets does not go into {positions} positions")
        end = min(end + rows, len(lengths))
        ends.append(end)
    return ends

"""Batches have the form that Trainer needs, with rows in a reproducible order."""

import itertools

import numpy as np
import pytest
import torch

from gpt2_repro.batch_plan import BatchPlan, passes_by_length
from gpt2_repro.data.batching import EpochSampler, LengthGroupedBatches, collate_rows


SOURCE = np.random.default_rng(0)
# Numbers of targets of the rows of a split, from 1 to 512.
LENGTHS = {
    "all-longest": np.full(3000, 512),
    "all-shortest": np.ones(200_000, int),
    "uniform": SOURCE.integers(1, 513, 6000),
    "few-long": np.where(SOURCE.random(60_000) < 0.01, 512, SOURCE.integers(1, 9, 60_000)),
    # One more than 512 * m / (m + 1), with m = 8: m + 1 such rows just do not fit into the space of m rows of 512.
    "worst-for-8": np.full(4000, 512 * 8 // 9 + 1),
}


def rows_of_steps(targets: np.ndarray, tokens: int) -> list[set[int]]:
    """Return the rows of each step, computed by a simple loop over the rows."""
    steps: list[set[int]] = [set() for _ in range(targets.sum() // tokens)]
    before = 0
    for row in EpochSampler(len(targets), rows_per_step=1, seed=1, shuffle=True):
        if before // tokens < len(steps):
            steps[before // tokens].add(row)
        before += int(targets[row])
    return steps


@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize(("rows", "processes"), [(64, 1), (8, 3), (3, 1)])
def test_the_derived_batches_always_suffice(name: str, rows: int, processes: int) -> None:
    targets, tokens = LENGTHS[name], 65_536
    needed = passes_by_length(tokens, rows=rows, longest=512, shortest=int(targets.min()))
    plan = BatchPlan(tokens, 512, rows, processes, -(-needed // processes), 1, by_length=True)
    sampler = LengthGroupedBatches(targets, plan, seed=1)
    per_step = sampler.plan.passes_per_step
    batches = list(sampler)
    assert len(batches) == len(sampler) == targets.sum() // tokens * per_step > 0 == per_step % processes
    for batch in batches:
        assert 0 < len(batch) * targets[batch].max() <= rows * 512
    for number, step in enumerate(rows_of_steps(targets, tokens)):
        joined = list(itertools.chain(*batches[number * per_step : (number + 1) * per_step]))
        assert len(joined) == len(step) and set(joined) == step
        assert (np.diff(targets[joined]) <= 0).all()  # neighbouring rows have similar lengths
        assert abs(targets[joined].sum() - tokens) < targets.max()


@pytest.mark.parametrize(
    ("lengths", "shape", "inputs", "labels"),
    [
        ((4, 4), {}, [[0, 1, 2], [10, 11, 12]], [[1, 2, 3], [11, 12, 13]]),
        ((4, 2), {}, [[0, 1, 2], [10, 0, 0]], [[1, 2, 3], [11, -100, -100]]),
        ((3,), {"num_rows": 2, "length": 3}, [[0, 1, 0], [0, 0, 0]], [[1, 2, -100], [-100] * 3]),
    ],
)
def test_shorter_rows_are_padded_behind_their_end(lengths, shape: dict, inputs: list, labels: list) -> None:
    rows = [{"input_ids": np.arange(row * 10, row * 10 + n, dtype=np.uint16)} for row, n in enumerate(lengths)]
    batch = collate_rows(rows, **shape)
    assert batch.keys() == {"input_ids", "labels", "shift_labels"}
    assert batch["input_ids"].tolist() == inputs and batch["labels"].tolist() == labels
    assert batch["shift_labels"] is batch["labels"]
    for tensor in batch.values():
        assert tensor.dtype == torch.int64 and tensor.is_contiguous()


def test_an_epoch_has_whole_steps_and_an_order_of_seed_and_epoch_alone() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        sampler = EpochSampler(103, rows_per_step=10, seed=seed, shuffle=True)
        sampler.set_epoch(epoch)
        np.random.seed(epoch * 7 + 1)  # the global random state must have no effect
        torch.manual_seed(epoch)
        rows = list(sampler)
        assert len(rows) == len(sampler) == 100 == len(set(rows)) and set(rows) < set(range(103))
        return rows

    assert order(1, 0) == order(1, 0)
    assert len({tuple(order(seed, epoch)) for seed in (1, 2) for epoch in (0, 1)}) == 4
    assert list(EpochSampler(23, rows_per_step=4, seed=9, shuffle=False)) == list(range(20))


def test_a_large_folder_is_read_in_blocks_and_shuffled_in_windows() -> None:
    order = list(EpochSampler(100_001, rows_per_step=1, seed=3, shuffle=True))
    assert sorted(order) == list(range(100_001))
    blocks = {row // 64 for row in order[: 2**15]}
    assert len(blocks) == 512 and max(blocks) - min(blocks) > 600  # complete blocks from distant places of the split
    assert len({row // 64 for row in order[:64]}) > 32  # with their rows mixed

"""Batches have the form that Trainer needs, with rows in a reproducible order."""

import itertools

import numpy as np
import pytest
import torch

from gpt2_repro.batch_plan import BatchPlan, passes_by_length
from gpt2_repro.data.batching import EpochSampler, LengthGroupedBatches, collate_rows, cut_by_length


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


def batches_of(targets: np.ndarray, *, tokens: int, rows: int, processes: int, seed: int = 1) -> LengthGroupedBatches:
    """Return batches of rows that are grouped by length.

    A batch of one process has space for `rows` rows of 512 targets. `tokens` is the number of targets per step.
    """
    needed = passes_by_length(tokens, rows=rows, longest=512, shortest=int(targets.min()))
    plan = BatchPlan(tokens, 512, rows, processes, -(-needed // processes), 1, by_length=True)
    return LengthGroupedBatches(targets, plan, seed=seed)


def rows_of_steps(targets: np.ndarray, tokens: int, *, seed: int, epoch: int = 0) -> list[set[int]]:
    """Return the rows of each step, computed by a simple loop over the rows."""
    order = EpochSampler(len(targets), rows_per_step=1, seed=seed, shuffle=True)
    order.set_epoch(epoch)
    steps: list[set[int]] = [set() for _ in range(targets.sum() // tokens)]
    before = 0
    for row in order:
        if before // tokens < len(steps):
            steps[before // tokens].add(row)
        before += int(targets[row])
    return steps


@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize(("rows", "processes"), [(64, 1), (8, 3), (16, 8), (3, 1)])
def test_the_derived_batches_always_suffice(name: str, rows: int, processes: int) -> None:
    targets, tokens = LENGTHS[name], 65_536
    sampler = batches_of(targets, tokens=tokens, rows=rows, processes=processes)
    per_step = sampler.batches_per_step
    assert per_step % processes == 0
    batches = list(sampler)
    assert len(batches) == len(sampler) == targets.sum() // tokens * per_step > 0
    for batch in batches:
        assert 0 < len(batch) * targets[batch].max() <= rows * 512
    for number, step in enumerate(rows_of_steps(targets, tokens, seed=1)):
        own = batches[number * per_step : (number + 1) * per_step]
        joined = list(itertools.chain(*own))
        assert len(joined) == len(step) and set(joined) == step
        assert (np.diff(targets[joined]) <= 0).all()  # neighbouring rows have similar lengths
        assert abs(targets[joined].sum() - tokens) < targets.max()


def test_steps_follow_the_order_of_seed_and_epoch_in_any_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EpochSampler, "BLOCK", 4)
    targets = SOURCE.integers(1, 513, 1002)
    found = []
    for seed, epoch, window in ((1, 0, 20), (1, 0, 100), (2, 0, 100), (1, 1, 100)):  # in rows; a step has about 32
        monkeypatch.setattr(EpochSampler, "WINDOW", window)
        sampler = batches_of(targets, tokens=8192, rows=8, processes=1, seed=seed)
        sampler.set_epoch(epoch)
        np.random.seed(len(found))  # the global random state must have no effect
        found.append([set(rows.tolist()) for rows in sampler.steps()])
        assert found[-1] == rows_of_steps(targets, 8192, seed=seed, epoch=epoch)
    assert found[1] != found[2] != found[3] != found[1]


def test_the_largest_batch_is_as_small_as_it_can_be() -> None:
    for _ in range(200):
        lengths = sorted(SOURCE.integers(1, 30, SOURCE.integers(4, 10)).tolist(), reverse=True)
        number = int(SOURCE.integers(1, 5))

        def largest(ends: tuple[int, ...], lengths: list[int] = lengths) -> int:
            return max(lengths[start] * (end - start) for start, end in itertools.pairwise([0, *ends]))

        cuts = itertools.combinations(range(1, len(lengths)), number - 1)
        best = min(largest((*cut, len(lengths))) for cut in cuts)
        ends = cut_by_length(lengths, number, 1000)
        assert len(ends) == number and ends == sorted(set(ends)) and ends[-1] == len(lengths)
        assert largest(tuple(ends)) == best
        assert cut_by_length(lengths, number, best) == ends


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


def test_a_large_folder_is_read_in_blocks_and_shuffled_in_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EpochSampler, "BLOCK", 4)
    monkeypatch.setattr(EpochSampler, "WINDOW", 20)
    order = list(EpochSampler(1002, rows_per_step=1, seed=3, shuffle=True))
    assert sorted(order) == list(range(1002))
    blocks = {row // 4 for row in order[:20]}
    assert len(blocks) == 5 and max(blocks) - min(blocks) > 20  # five complete blocks from distant places of the split
    assert any(order[i] // 4 != order[i + 1] // 4 for i in range(0, 20, 4))  # with their rows mixed
    places = np.empty(1002)
    places[order] = np.arange(1002)
    # The positions of rows that are far apart on disk are not correlated.
    assert abs(np.corrcoef(places[:-100], places[100:])[0, 1]) < 0.15

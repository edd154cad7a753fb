"""Batches have the form that Trainer needs, with rows in a reproducible order."""

import numpy as np
import pytest
import torch

from gpt2_repro.data.batching import EpochSampler, collate_rows


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

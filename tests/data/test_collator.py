"""Batches have the form that Trainer and the loss need; the order of rows is a function of the seed alone."""

import numpy as np
import pytest
import torch

from gpt2_repro.data.collator import EpochSampler, collate_rows


def test_batch_form() -> None:
    rows = [{"input_ids": np.arange(start, start + 9, dtype=np.uint16)} for start in (0, 100)]
    batch = collate_rows(rows)
    assert batch.keys() == {"input_ids", "labels", "shift_labels"}
    assert batch["input_ids"].tolist() == [list(range(8)), list(range(100, 108))]
    assert batch["labels"].tolist() == [list(range(1, 9)), list(range(101, 109))]
    assert batch["shift_labels"] is batch["labels"]
    for tensor in batch.values():
        assert tensor.dtype == torch.int64 and tensor.is_contiguous()


def test_rows_of_different_lengths_are_padded_behind_their_end() -> None:
    lengths = (4, 2, 6)
    rows = [{"input_ids": np.arange(start * 10, start * 10 + n, dtype=np.uint16)} for start, n in enumerate(lengths)]
    batch = collate_rows(rows)
    assert batch["input_ids"].tolist() == [[0, 1, 2, 0, 0], [10, 0, 0, 0, 0], [20, 21, 22, 23, 24]]
    assert batch["labels"].tolist() == [[1, 2, 3, -100, -100], [11, -100, -100, -100, -100], [21, 22, 23, 24, 25]]
    assert batch["shift_labels"] is batch["labels"]
    for tensor in batch.values():
        assert tensor.dtype == torch.int64 and tensor.is_contiguous()


def test_padding_changes_no_loss() -> None:
    from gpt2_repro.model.arguments import ModelArguments
    from gpt2_repro.model.build import build_model
    from gpt2_repro.model.configuration import build_config

    torch.manual_seed(0)
    shape = ModelArguments(n_layer=1, n_head=2, n_embd=16)
    model = build_model(build_config(shape, sequence_length=8, vocab_size=64), attention="causal_sdpa").eval()
    source = np.random.default_rng(0)
    rows = [{"input_ids": source.integers(0, 64, n).astype(np.uint16)} for n in (9, 3, 6)]
    alone = [model(**collate_rows([row])).loss.item() * (len(row["input_ids"]) - 1) for row in rows]
    together = model(**collate_rows(rows)).loss.item()
    assert together == pytest.approx(sum(alone) / (8 + 2 + 5), rel=1e-6)


def test_an_epoch_has_whole_steps_and_no_row_twice() -> None:
    sampler = EpochSampler(103, rows_per_step=10, seed=1, shuffle=True)
    order = list(sampler)
    assert len(order) == len(sampler) == 100 == len(set(order))
    assert set(order) < set(range(103))


def test_the_order_depends_on_seed_and_epoch_alone() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        sampler = EpochSampler(50, rows_per_step=5, seed=seed, shuffle=True)
        sampler.set_epoch(epoch)
        np.random.seed(epoch * 7 + 1)  # nothing global may matter
        torch.manual_seed(epoch)
        return list(sampler)

    assert order(1, 0) == order(1, 0)
    assert len({tuple(order(seed, epoch)) for seed in (1, 2) for epoch in (0, 1)}) == 4


def test_a_large_folder_is_read_in_blocks_and_shuffled_in_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EpochSampler, "BLOCK", 4)
    monkeypatch.setattr(EpochSampler, "WINDOW", 20)
    order = list(EpochSampler(1002, rows_per_step=1, seed=3, shuffle=True))
    assert sorted(order) == list(range(1002))
    blocks = {row // 4 for row in order[:20]}
    assert len(blocks) == 5 and max(blocks) - min(blocks) > 20  # five whole blocks from all over the folder
    assert any(order[i] // 4 != order[i + 1] // 4 for i in range(0, 20, 4))  # whose rows are mixed
    places = np.empty(1002)
    places[order] = np.arange(1002)
    # Far apart on the disk, independent in the order.
    assert abs(np.corrcoef(places[:-100], places[100:])[0, 1]) < 0.15


@pytest.mark.parametrize("num_rows", [20, 23])
def test_sequential_rows_lie_as_in_the_folder(num_rows: int) -> None:
    assert list(EpochSampler(num_rows, rows_per_step=4, seed=9, shuffle=False)) == list(range(20))


def test_a_batch_of_a_given_shape_has_no_further_targets() -> None:
    rows = [{"input_ids": np.arange(1, 5, dtype=np.uint16)}, {"input_ids": np.arange(1, 4, dtype=np.uint16)}]
    batch = collate_rows(rows, num_rows=3, length=4)
    assert batch["input_ids"].tolist() == [[1, 2, 3, 0], [1, 2, 0, 0], [0, 0, 0, 0]]
    assert batch["shift_labels"].tolist() == [[2, 3, 4, -100], [2, 3, -100, -100], [-100] * 4]

"""Processes that read rows keep to themselves."""

import os
from types import SimpleNamespace

import torch

from gpt2_repro.data.collator import EpochSampler
from gpt2_repro.training.loader import training_loader


def test_readers_touch_neither_signals_nor_randomness() -> None:
    """A reader that dies of a launcher's SIGTERM would end the trainer with an error before it can save."""
    args = SimpleNamespace(
        per_device_train_batch_size=2,
        dataloader_num_workers=2,
        dataloader_pin_memory=False,
        dataloader_persistent_workers=True,
        dataloader_prefetch_factor=2,
        dataloader_multiprocessing_context=None,
        dataloader_in_order=True,
        seed=1,
    )
    sampler = EpochSampler(100, rows_per_step=4, seed=1, shuffle=True)
    loader = training_loader(list(range(100)), sampler, lambda rows: rows, args)
    state = torch.get_rng_state()
    batches = iter(loader)
    read = [next(batches), next(batches)]  # one of each reader
    # What follows, dropout say, is the same whether this is the first start of the readers or one after a resume.
    assert torch.equal(torch.get_rng_state(), state)
    groups = {os.getpgid(worker.pid) for worker in batches._workers}
    assert len(groups) == 2 and os.getpgrp() not in groups
    read += list(batches)
    assert [row for batch in read for row in batch] == list(sampler)

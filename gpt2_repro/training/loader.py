"""In which order a run reads its rows, and in which batches."""

import os
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader

from gpt2_repro.batch_plan import IGNORED, BatchPlan
from gpt2_repro.data.batching import EpochSampler, LengthGroupedBatches
from gpt2_repro.data.rows import Rows
from gpt2_repro.training.arguments import PretrainingArguments


def choose_sampler(rows: Rows, plan: BatchPlan, args: PretrainingArguments) -> EpochSampler | LengthGroupedBatches:
    """The order of the rows; by length, the batches too."""
    seed = args.seed if args.data_seed is None else args.data_seed
    if not plan.by_length:
        shuffle = args.train_sampling_strategy == "random"
        return EpochSampler(len(rows), rows_per_step=plan.rows_per_step, seed=seed, shuffle=shuffle)
    return LengthGroupedBatches(
        rows.lengths() - 1,
        tokens_per_step=plan.tokens_per_step,
        batches_per_step=plan.passes_per_step,
        max_positions=plan.positions_per_pass,
        seed=seed,
    )


def training_loader(
    rows: Rows, sampler: EpochSampler | LengthGroupedBatches, collate: Callable[..., Any], args: PretrainingArguments
) -> DataLoader:
    """The loader of all processes, which accelerate then cuts: of rows in the sampler's order, or of its batches."""
    if isinstance(sampler, LengthGroupedBatches):
        cut: dict[str, Any] = {"batch_sampler": sampler}
    else:
        cut = {"sampler": sampler, "batch_size": args.per_device_train_batch_size}
    return DataLoader(
        rows,
        **cut,
        collate_fn=collate,
        num_workers=args.dataloader_num_workers,
        pin_memory=args.dataloader_pin_memory,
        persistent_workers=args.dataloader_persistent_workers,
        prefetch_factor=args.dataloader_prefetch_factor,
        multiprocessing_context=args.dataloader_multiprocessing_context,
        in_order=args.dataloader_in_order,
        worker_init_fn=leave_process_group,
        # A loader draws a seed for its workers each time it starts them: in a straight run once, after a resume once more.
        # From the global generator it would shift the dropout of all steps after (torch 2.13, persistent workers).
        generator=torch.Generator().manual_seed(args.seed),
    )


def leave_process_group(worker: int) -> None:
    """In a process that reads rows: no signal meant for the trainer ends it.

    A launcher signals whole process groups. A reader that dies of SIGTERM would end the trainer with an error
    (torch/utils/data/_utils/signal_handling.py) before the step is done that it could still save.
    """
    os.setpgid(0, 0)


def count_positions(batches: list[dict[str, torch.Tensor]], device: torch.device) -> torch.Tensor:
    """Targets, and positions with padding, of some batches [2], on the device: nothing waits for it."""
    targets = torch.stack([batch["labels"].ne(IGNORED).sum() for batch in batches]).sum()
    positions = sum(batch["labels"].numel() for batch in batches)
    return torch.stack([targets, torch.full_like(targets, positions)]).to(device)

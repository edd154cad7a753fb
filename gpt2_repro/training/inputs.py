"""What a run reads: rows, tokenizer and HellaSwag, opened before anything is built, and the loader of the rows."""

import dataclasses
import functools
import logging
import os
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase

from gpt2_repro.batch_plan import IGNORED, BatchPlan
from gpt2_repro.data.batching import EpochSampler, LengthGroupedBatches, collate_rows
from gpt2_repro.data.prepared import PreparedData
from gpt2_repro.data.rows import Rows
from gpt2_repro.errors import RunFailed
from gpt2_repro.evaluation.hellaswag import HellaSwag, read_items
from gpt2_repro.model.export import start_ids
from gpt2_repro.training import ranks
from gpt2_repro.training.arguments import PretrainingArguments


logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The data of a run.

    Args:
        validation: sets of rows by name, the main one as "".
        hellaswag: None if it is never scored.
    """

    train: Rows
    validation: dict[str, Rows]
    tokenizer: PreTrainedTokenizerBase
    hellaswag: HellaSwag | None


def open_inputs(data: PreparedData, args: PretrainingArguments) -> Inputs:
    """Open the prepared folder, and HellaSwag if it is scored.

    Raises UserError for a folder that does not fit, a prompt that cannot start a sample, and a file without HellaSwag items.
    """
    length, tokenizer = data.manifest.form.sequence_length, data.tokenizer
    data.lock()
    train, validation = data.rows("train"), data.validation(eval_tokens=args.eval_tokens)
    if args.sample_steps and args.sample_tokens:
        start_ids(tokenizer, args.sample_prompt, window=length)
    return Inputs(train, validation, tokenizer, _open_hellaswag(args, tokenizer, window=length))


def _open_hellaswag(
    args: PretrainingArguments, tokenizer: PreTrainedTokenizerBase, *, window: int
) -> HellaSwag | None:
    """Return HellaSwag, or None if it is not requested or the Hub cannot be reached: training needs no network."""
    if not args.hellaswag_steps:
        return None
    if args.eval_strategy == "no":
        logger.warning("HellaSwag is scored with validations: --eval_strategy no leaves it out")
        return None
    items = []
    try:
        items = read_items(args.hellaswag_data)
    except RunFailed as error:
        logger.warning("HellaSwag is not scored: %s", error)
    # All ranks score it, or none does.
    return None if ranks.largest(int(not items)) else HellaSwag(items, tokenizer, window=window)


Sampler = EpochSampler | LengthGroupedBatches


def choose_sampler(rows: Rows, plan: BatchPlan, args: PretrainingArguments) -> Sampler:
    """Return the order of the rows, and for rows by length the batches."""
    seed = args.seed if args.data_seed is None else args.data_seed
    if not plan.by_length:
        shuffle = args.train_sampling_strategy == "random"
        return EpochSampler(len(rows), rows_per_step=plan.rows_per_step, seed=seed, shuffle=shuffle)
    return LengthGroupedBatches(rows.lengths() - 1, plan, seed=seed)


def training_loader(rows: Rows, sampler: Sampler, plan: BatchPlan, args: PretrainingArguments) -> DataLoader:
    """Return the loader of all processes, which accelerate then splits, in the order of the sampler."""
    # A compiled model wants one shape: rows of wrapped documents are padded to the longest that there can be.
    length = plan.sequence_length if args.compile_loss else None
    if isinstance(sampler, LengthGroupedBatches):
        cut: dict[str, Any] = {"batch_sampler": sampler}
    else:
        cut = {"sampler": sampler, "batch_size": args.per_device_train_batch_size}
    return DataLoader(
        rows,
        **cut,
        collate_fn=functools.partial(collate_rows, length=length),
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
    """Protect a process that reads rows from signals to the trainer.

    A launcher signals whole process groups. A reader that dies of SIGTERM would end the trainer with an error
    (torch/utils/data/_utils/signal_handling.py) before it can finish and save the step.
    """
    os.setpgid(0, 0)


def count_positions(batches: list[dict[str, torch.Tensor]], device: torch.device) -> torch.Tensor:
    """Count the targets, and the positions with padding, of some batches [2], on the device without a host sync."""
    targets = torch.stack([batch["labels"].ne(IGNORED).sum() for batch in batches]).sum()
    positions = sum(batch["labels"].numel() for batch in batches)
    return torch.stack([targets, torch.full_like(targets, positions)]).to(device)

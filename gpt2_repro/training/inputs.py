"""Open the rows, tokenizer and HellaSwag items of a run, and build its dataloader."""

import dataclasses
import functools
import logging
import os
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader
from transformers import PreTrainedTokenizerBase, TrainingArguments

from gpt2_repro import ranks
from gpt2_repro.data.batching import EpochSampler, collate_rows
from gpt2_repro.data.prepared import PreparedData
from gpt2_repro.data.rows import Rows
from gpt2_repro.errors import RunFailed
from gpt2_repro.evaluation.hellaswag import HellaSwag, Item, read_items
from gpt2_repro.recipe import TrainingSection
from gpt2_repro.run_record.environment import BatchPlan
from gpt2_repro.tokenization import start_ids
from gpt2_repro.tokens import IGNORED


logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The rows, the tokenizer and the HellaSwag items of a run.

    Args:
        validation: the rows of each validation set, by name. The main validation set has the name "".
        hellaswag: None if the run does not score HellaSwag.
    """

    train: Rows
    validation: dict[str, Rows]
    tokenizer: PreTrainedTokenizerBase
    hellaswag: HellaSwag | None


def open_inputs(data: PreparedData, settings: TrainingSection) -> Inputs:
    """Open the rows, the tokenizer and the HellaSwag items of a run.

    The prepared folder is locked until this process ends.

    Raises UserError if the folder is damaged or is being replaced, if the sample prompt cannot be used, or if the file
    of --hellaswag_data contains no items.
    """
    length = data.manifest.form.sequence_length
    tokenizer = data.tokenizer
    data.lock()
    if settings.sample_steps and settings.sample_tokens:
        start_ids(tokenizer, settings.sample_prompt, window=length)
    return Inputs(
        train=data.rows("train"),
        validation=data.validation(eval_tokens=settings.eval_tokens),
        tokenizer=tokenizer,
        hellaswag=_open_hellaswag(settings, tokenizer, length),
    )


def _open_hellaswag(settings: TrainingSection, tokenizer: PreTrainedTokenizerBase, window: int) -> HellaSwag | None:
    """Return the HellaSwag items, or None if the run does not score HellaSwag.

    The result is also None if the items cannot be downloaded.

    Args:
        window: the maximum number of positions per row.
    """
    if not settings.hellaswag_steps or settings.eval_strategy == "no":
        return None
    items: list[Item] = []
    try:
        items = read_items(settings.hellaswag_data)
    except RunFailed as error:
        logger.warning("HellaSwag is not scored: %s", error)
    if ranks.largest(int(not items)):  # if one rank has no items, no rank scores HellaSwag
        return None
    return HellaSwag(items, tokenizer, window=window)


def training_loader(rows: Rows, plan: BatchPlan, args: TrainingArguments, *, compiled: bool) -> tuple[DataLoader, Any]:
    """Return a dataloader of the training rows, and its sampler, which needs `set_epoch`.

    The loader yields the batches of all processes, and accelerate distributes them.
    """
    seed = args.seed
    if args.data_seed is not None:
        seed = args.data_seed
    # With Trainer's RandomSampler, the last step of each epoch has fewer rows.
    shuffle = args.train_sampling_strategy == "random"
    sampler = EpochSampler(len(rows), rows_per_step=plan.rows_per_step, seed=seed, shuffle=shuffle)
    batches = BatchSampler(sampler, args.per_device_train_batch_size, drop_last=False)
    length = None
    if compiled:
        # A compiled model needs one shape, so rows of different lengths are padded to the sequence length.
        length = plan.sequence_length
    loader = DataLoader(
        rows,
        batch_sampler=batches,
        collate_fn=functools.partial(collate_rows, length=length),
        num_workers=args.dataloader_num_workers,
        pin_memory=args.dataloader_pin_memory and args.device.type != "mps",
        persistent_workers=args.dataloader_num_workers > 0,
        prefetch_factor=args.dataloader_prefetch_factor,
        in_order=args.dataloader_in_order,
        worker_init_fn=leave_process_group,
        # A dataloader draws a seed each time it starts its workers: once in an uninterrupted run, and again after a
        # resume. Drawn from the global generator, it would change the dropout of all later steps (torch 2.13,
        # persistent workers).
        generator=torch.Generator().manual_seed(args.seed),
    )
    return loader, sampler


def leave_process_group(worker: int) -> None:
    """Move a dataloader worker to its own process group, to protect it from signals."""
    # Launchers send signals to process groups. If SIGTERM killed a worker, the trainer would fail and could not save
    # the current step (torch/utils/data/_utils/signal_handling.py).
    os.setpgid(0, 0)


def count_positions(batches: list[dict[str, torch.Tensor]], device: torch.device) -> torch.Tensor:
    """Return the number of targets and of positions, as a tensor of shape [2].

    The positions include padding.
    """
    targets = torch.stack([batch["labels"].ne(IGNORED).sum() for batch in batches]).sum()
    positions = sum(batch["labels"].numel() for batch in batches)
    return torch.stack([targets, torch.full_like(targets, positions)]).to(device)

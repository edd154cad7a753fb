"""Compute HellaSwag accuracy as in llm.c (dev/data/hellaswag.py).

Scores of lm-eval's task `hellaswag` are different, because lm-eval rewrites the text.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from gpt2_repro.errors import RunFailed, UserError, in_a_line
from gpt2_repro.evaluation.tasks import ENDINGS, read_columns
from gpt2_repro.files import read_json_lines
from gpt2_repro.hub import check_hub
from gpt2_repro.tokenization import encode
from gpt2_repro.tokens import IGNORED


ScoredIds = tuple[list[int], int]  # the ids of a text, and how many at the end are scored

logger = logging.getLogger(__name__)

FIX = "Pass HellaSwag's validation split as a .jsonl file, or score without HellaSwag (--hellaswag_steps 0, --tasks)."


class Item(NamedTuple):
    """A HellaSwag item: a context, its endings and the index of the correct ending."""

    ctx: str
    endings: tuple[str, ...]
    label: int


def read_items(source: str) -> list[Item]:
    """Return HellaSwag items from a local file or a Hub dataset's validation split.

    A local file (.jsonl, .json or .gz) contains one JSON object per line.

    Raises UserError if the source does not exist or contains other data, and RunFailed if the Hub cannot be reached.
    """
    if source.endswith((".jsonl", ".json", ".gz")):
        if not Path(source).is_file():
            raise UserError(f"{source} does not exist. {FIX}")
        rows = read_json_lines(Path(source))
    else:
        rows = enumerate(_validation_split(source), start=1)
    items: list[Item] = []
    for columns in read_columns(rows, Item._fields, source):
        endings = tuple(columns["endings"])
        items.append(Item(columns["ctx"], endings, columns["label"]))
    return items


def _validation_split(name: str) -> Any:
    """Load the validation split of a Hub dataset."""
    import datasets

    check_hub()
    try:
        return datasets.load_dataset(name, split="validation")
    except Exception as error:  # network, Hub, cache and builder errors have no common class
        problem = f"HellaSwag ({name}) cannot be loaded from the Hub: {in_a_line(error)}. {FIX}"
        if isinstance(error, datasets.exceptions.DatasetNotFoundError):
            raise UserError(problem) from None
        raise RunFailed(problem) from None


def cut(ids: list[int], targets: int, window: int) -> ScoredIds:
    """Return a row of the last `window` positions of a text, of which the last `targets` ids are scored."""
    ids = ids[-window - 1 :]
    return ids, min(targets, len(ids) - 1)


def batches_by_length(lengths: Sequence[int], positions: int) -> list[list[int]]:
    """Return batches of row numbers, with rows of similar length in each batch.

    A batch has at most `positions` tokens, including padding. A row with more than `positions` tokens is a batch of
    its own.
    """
    batches: list[list[int]] = []
    longest = 0  # of the last batch
    longest_first = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    for number in longest_first:
        if batches:
            batch = batches[-1]
            padded = (len(batch) + 1) * longest
            if padded <= positions:
                batch.append(number)
                continue
        batches.append([number])
        longest = lengths[number]
    return batches


class HellaSwag:
    """HellaSwag items as rows of token ids. A row is a context followed by one ending.

    Rows of more than `window` positions are truncated on the left.

    Raises UserError if the tokenizer cannot encode an item.
    """

    def __init__(self, items: Sequence[Item], tokenizer: Any, *, window: int) -> None:
        self.labels = torch.tensor([item.label for item in items])
        self.rows: list[ScoredIds] = []
        # As in lm-eval, context and ending are encoded together, and the length of the context is subtracted.
        whole_texts: list[str] = []
        for item in items:
            for ending in item.endings:
                whole_texts.append(f"{item.ctx} {ending}")
        try:
            contexts = encode(tokenizer, [item.ctx for item in items])
            texts = encode(tokenizer, whole_texts)
        except UserError:
            raise UserError("The tokenizer cannot encode HellaSwag. Pass --hellaswag_steps 0.") from None
        for number, text in enumerate(texts):
            context = contexts[number // ENDINGS]
            ending_length = len(text) - len(context)
            row, targets = cut(text, ending_length, window)
            if targets < 1:
                raise UserError("The tokenizer gives no tokens for a text of HellaSwag. Pass --hellaswag_steps 0.")
            self.rows.append((row, targets))

    def batches(self, positions: int) -> list[list[int]]:
        """Return batches of row numbers, with at most `positions` token positions each."""
        return _batches(self.rows, positions)

    def score(self, losses: Tensor) -> dict[str, float]:
        """Return hellaswag_acc and hellaswag_items, or {} if one of the losses [4 * items] is not finite."""
        # With NaN losses, argmin chooses the first ending, and a quarter of the items would count as correct.
        if not losses.isfinite().all():
            logger.warning("No HellaSwag score at this step: the loss of an ending is NaN or infinite.")
            return {}
        losses_of_items = losses.view(-1, ENDINGS)
        chosen = losses_of_items.argmin(dim=1).cpu()
        right = int((chosen == self.labels).sum())
        items = len(self.labels)
        return {
            "hellaswag_acc": round(right / items, 6),
            "hellaswag_items": items,
        }


def _batches(rows: Sequence[ScoredIds], positions: int) -> list[list[int]]:
    lengths = [len(ids) - 1 for ids, _ in rows]  # the last id has no target
    return batches_by_length(lengths, positions)


def mean_losses(
    rows: Sequence[ScoredIds],
    losses_of: Callable[[Tensor, Tensor], Tensor],
    *,
    positions: int,
    device: torch.device,
    process: int = 0,
    processes: int = 1,
    after_batch: Callable[[], None] = lambda: None,
    progress: Callable[[range], Iterable[int]] = iter,
) -> Tensor:
    """Return the mean loss of each row's scored ids in nats per token, of shape [rows].

    The loss is 0 for rows that other processes score.

    Args:
        losses_of: takes ids and labels of shape [rows, T], and returns losses of shape [targets]. Labels of -100 are
            not targets.
        positions: the maximum number of tokens in one forward pass, including padding.
        after_batch: a function that is called after each pass.
        progress: wraps the passes, to show a progress bar.
    """
    means = torch.zeros(len(rows), dtype=torch.float64, device=_sum_device(device))
    batches = _batches(rows, positions)
    for first in progress(range(0, len(batches), processes)):
        # With sharded weights all ranks must run the same number of passes. Idle ranks repeat the last batch.
        own = first + process
        is_own = own < len(batches)
        numbers = batches[-1]
        if is_own:
            numbers = batches[own]
        rows_of_batch = [rows[number] for number in numbers]
        means_of_batch = batch_means(rows_of_batch, losses_of, device)
        if is_own:
            index = torch.tensor(numbers, device=means.device)
            means[index] = means_of_batch
        after_batch()
    return means


def batch_means(
    rows: Sequence[ScoredIds], losses_of: Callable[[Tensor, Tensor], Tensor], device: torch.device
) -> Tensor:
    """Return the mean loss of each row's scored ids in nats per token, of shape [rows], in one forward pass."""
    ids, labels, row_of_target = _collate(rows)
    losses = losses_of(ids.to(device), labels.to(device))
    sum_device = _sum_device(device)
    row_of_target = row_of_target.to(sum_device)
    sums = torch.zeros(len(rows), dtype=torch.float64, device=sum_device)
    sums.index_add_(0, row_of_target, losses.to(sum_device).double())
    return sums / row_of_target.bincount()


def _sum_device(device: torch.device) -> torch.device:
    if device.type == "mps":
        return torch.device("cpu")  # Apple GPUs have no fp64
    return device


def _collate(rows: Sequence[ScoredIds]) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids and labels [rows, T] of a batch, and each target's row index [targets]."""
    # Padding is on the right, so no position of a row attends to padding.
    inputs = [torch.tensor(row[:-1]) for row, _ in rows]
    ids = pad_sequence(inputs, batch_first=True)
    labels = torch.full_like(ids, IGNORED)
    for number, (row, targets) in enumerate(rows):
        end = len(row) - 1
        start = end - targets
        labels[number, start:end] = torch.tensor(row[-targets:])
    row_of_target = (labels != IGNORED).nonzero()[:, 0]
    return ids, labels, row_of_target

"""HellaSwag during training, as llm.c scores it (dev/data/hellaswag.py): completion style, by the loss per token.

An item is a context and four endings. The answer is the ending with the lowest mean loss over its own tokens. The text
is not changed; context and endings are tokenized separately, with a space before an ending. evaluate.sh has this score
as `hellaswag_completion`; the harness's own `hellaswag` rewrites the text and has other numbers.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from gpt2_repro.batch_plan import IGNORED
from gpt2_repro.errors import RunFailed, UserError, in_a_line
from gpt2_repro.files import read_json_lines
from gpt2_repro.hub import check_hub


logger = logging.getLogger(__name__)

HUB_ID = "Rowan/hellaswag"
ENDINGS = 4
LABELS = [*range(ENDINGS), *map(str, range(ENDINGS))]  # numbers in some copies, text in others
SKIP = "or pass --hellaswag_steps 0"


class Item(NamedTuple):
    """A context, its endings and the number of the right one, named as in the files."""

    ctx: str
    endings: tuple[str, ...]
    label: int


def read_items(source: str) -> list[Item]:
    """Return the items of a local file of JSON lines, .gz or not, or of the validation split of a Hub dataset.

    Raises UserError for a missing file, for lines that are not HellaSwag's, and for a dataset that the Hub does not have;
    RunFailed if the Hub cannot be reached.
    """
    if not source.endswith((".jsonl", ".json", ".gz")):
        rows = _load_from_hub(source)
    elif Path(source).is_file():
        rows = (row for _, row in read_json_lines(Path(source)))
    else:
        raise UserError(f"There is no --hellaswag_data {source}. Pass a file of HellaSwag's lines, a Hub id, {SKIP}.")
    items = [_item(row, f"{source}, item {number}") for number, row in enumerate(rows, start=1)]
    if not items:
        raise UserError(f"{source} is empty. Pass HellaSwag's validation split, {SKIP}.")
    return items


def _load_from_hub(source: str) -> Iterable[Any]:
    import datasets

    check_hub()
    try:
        return datasets.load_dataset(source, split="validation")
    except Exception as error:  # of a network, a Hub, a cache and a builder there is nothing narrower
        kind = UserError if isinstance(error, datasets.exceptions.DatasetNotFoundError) else RunFailed
        fix = f"Pass a local file as --hellaswag_data, {SKIP}."
        raise kind(f"HellaSwag ({source}) cannot be loaded from the Hub: {in_a_line(error)}. {fix}") from None


def _item(row: Any, where: str) -> Item:
    fields: Mapping[str, Any] = row if isinstance(row, Mapping) else {}
    context, endings, label = (fields.get(name) for name in Item._fields)
    texts = [context, *endings] if isinstance(endings, list | tuple) else []
    if len(texts) != 1 + ENDINGS or not all(isinstance(text, str) and text for text in texts) or label not in LABELS:
        found = f"{where} needs a text ctx, {ENDINGS} texts endings and a label of 0 to {ENDINGS - 1}."
        raise UserError(f"{found} Pass HellaSwag's validation split, {SKIP}.")
    return Item(texts[0], tuple(texts[1:]), int(fields["label"]))


def batches_by_length(lengths: Sequence[int], positions: int) -> list[list[int]]:
    """Return row numbers, longest first, in batches of at most `positions` with their padding, or of one row."""
    batches: list[list[int]] = []
    for number in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= positions:
            batches[-1].append(number)
        else:
            batches.append([number])
    return batches


class HellaSwag:
    """The items as rows of ids, one per ending, and their losses under a model.

    Args:
        tokenizer: of the model.
        window: positions of the model. A longer row loses its beginning.

    Raises UserError if the tokenizer cannot encode an item.
    """

    def __init__(self, items: Sequence[Item], tokenizer: Any, *, window: int) -> None:
        self.labels = torch.tensor([item.label for item in items])
        contexts = _encode(tokenizer, [item.ctx for item in items])
        endings = _encode(tokenizer, [f" {ending}" for item in items for ending in item.endings])
        self.rows: list[tuple[list[int], int]] = []  # ids, and how many of them at the end are the ending's
        for number, ending in enumerate(endings):
            ids = (contexts[number // ENDINGS] + ending)[-window - 1 :]
            self.rows.append((ids, min(len(ending), len(ids) - 1)))

    def batches(self, positions: int) -> list[list[int]]:
        """Return row numbers in batches; see `batches_by_length`."""
        return batches_by_length([len(ids) - 1 for ids, _ in self.rows], positions)

    def losses(
        self,
        losses_of: Callable[[Tensor, Tensor], Tensor],
        *,
        positions: int,
        device: torch.device,
        process: int = 0,
        processes: int = 1,
        goes_on: Callable[[], bool] = lambda: True,
        after_batch: Callable[[], None] = lambda: None,
    ) -> Tensor:
        """Return the mean loss of each ending [items, 4] in nats per token, on the device; 0 for rows of other processes.

        Args:
            losses_of: maps ids and labels [rows, T], -100 without a target, to the loss of each target [targets].
            positions: of one pass at most.
            goes_on: called before each pass. If it returns false, the rest stays 0.
        """
        means = torch.zeros(len(self.rows), dtype=torch.float64, device=device)
        batches = self.batches(positions)
        for first in range(0, len(batches), processes):
            if not goes_on():
                break
            # Sharded weights need as many passes on all ranks. Idle ranks repeat the last batch.
            own = first + process < len(batches)
            numbers = batches[first + process if own else -1]
            ids, labels, row_of_target = (part.to(device) for part in self.collate(numbers))
            sums = torch.zeros(len(numbers), dtype=torch.float64, device=device)
            sums.index_add_(0, row_of_target, losses_of(ids, labels).double())
            if own:
                means[torch.tensor(numbers, device=device)] = sums / row_of_target.bincount()
            after_batch()
        return means.view(-1, ENDINGS)

    def collate(self, numbers: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Return ids and labels [rows, T] of rows by their numbers, and the row of each target.

        Padding is on the right, after everything that a position of the row attends to.
        """
        rows = [self.rows[number] for number in numbers]
        ids = pad_sequence([torch.tensor(row[:-1]) for row, _ in rows], batch_first=True)
        labels = torch.full_like(ids, IGNORED)
        for line, (row, targets) in enumerate(rows):
            labels[line, len(row) - 1 - targets : len(row) - 1] = torch.tensor(row[-targets:])
        return ids, labels, (labels != IGNORED).nonzero()[:, 0]

    def score(self, losses: Tensor) -> dict[str, float]:
        """Return `hellaswag_acc` and `hellaswag_items` from the losses of all endings [items, 4]; {} if one is not finite.

        With NaN the first ending would win each time, and be right a quarter of the time.
        """
        if not losses.isfinite().all():
            logger.warning("HellaSwag is not scored: the loss of an ending is not finite")
            return {}
        right = int((losses.argmin(dim=1).cpu() == self.labels).sum())
        return {"hellaswag_acc": round(right / len(self.labels), 6), "hellaswag_items": len(self.labels)}


def _encode(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    try:
        encoded = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    except Exception as error:  # `tokenizers` raises nothing narrower: a tokenizer of characters knows its own alone
        raise UserError(f"HellaSwag cannot be encoded by this tokenizer ({error}): pass --hellaswag_steps 0") from None
    if not all(encoded):
        raise UserError("this tokenizer makes no token of some of HellaSwag's texts: pass --hellaswag_steps 0")
    return encoded

"""Forward passes of an evaluation: the log-probabilities of texts, without logits that no score needs.

The functions take a model and a batch of texts, so that other processes can call them (evaluation/workers.py).
"""

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

from gpt2_repro.batch_plan import IGNORED
from gpt2_repro.evaluation.hellaswag import ScoredIds, batch_means


Answer = tuple[float, bool]  # a log-probability, and whether greedy decoding gives the scored ids


class Text(NamedTuple):
    """The ids of a text, of which the last `scored` ids are scored."""

    ids: list[int]
    scored: int
    request: int  # its number


class Branch(NamedTuple):
    """A text in a row. Its beginning is that of the row, and the rest are the ids from `start` to `end`."""

    request: int  # its number
    shared: int  # ids of the beginning of the row
    start: int
    end: int
    columns: list[int]  # of the row; the logits after these ids are for the targets
    targets: list[int]


class Row:
    """A text, and other texts that branch off from it. Common beginnings are computed once."""

    def __init__(self, text: Text) -> None:
        self.ids: list[int] = []
        self.positions: list[int] = []
        self.branches: list[Branch] = []
        self._append(text, 0)
        self.trunk = len(self.ids)

    def add(self, text: Text, *, most: int) -> bool:
        """Add a text if half of it is the beginning of the row and the row then has at most `most` ids."""
        inputs = text.ids[:-1]  # the last id has no target
        shared = len(os.path.commonprefix([self.ids[: self.trunk], inputs]))
        added = len(inputs) - shared
        if shared < added or len(self.ids) + added > most:
            return False
        self._append(text, shared)
        return True

    def _append(self, text: Text, shared: int) -> None:
        start = len(self.ids)
        inputs = text.ids[:-1]  # the last id has no target
        self.ids += inputs[shared:]
        self.positions += range(shared, len(inputs))
        end = len(self.ids)
        columns = [*range(shared), *range(start, end)]
        branch = Branch(
            request=text.request,
            shared=shared,
            start=start,
            end=end,
            columns=columns[-text.scored :],
            targets=text.ids[-text.scored :],
        )
        self.branches.append(branch)

    def mask(self, length: int) -> torch.Tensor:
        """Return which id attends to which, of shape [length, length]."""
        seen = torch.tril(torch.ones(length, length, dtype=torch.bool))
        for branch in self.branches:
            seen[branch.start : branch.end, branch.shared : branch.start] = False
        return seen


@torch.inference_mode()
def score_rows(model: Any, rows: Sequence[Row]) -> dict[int, Answer]:
    """Return the answers of a batch, by the number of the request."""
    device = model.device
    ids = _padded([row.ids for row in rows], device)
    options: dict[str, torch.Tensor] = {}
    num_branches = sum(len(row.branches) for row in rows)
    if num_branches > len(rows):
        length = ids.shape[1]
        mask = torch.stack([row.mask(length) for row in rows])
        options["position_ids"] = _padded([row.positions for row in rows], device)
        options["attention_mask"] = mask[:, None].to(device)
    branches: list[Branch] = []
    places: list[tuple[int, int]] = []
    for number, row in enumerate(rows):
        branches += row.branches
        for branch in row.branches:
            for column in branch.columns:
                places.append((number, column))
    all_logits = _logits(model, ids, torch.tensor(places), **options)
    logits_of = all_logits.split([len(branch.targets) for branch in branches])
    answers: dict[int, Answer] = {}
    for branch, logits in zip(branches, logits_of, strict=True):
        targets = torch.tensor(branch.targets, device=device)
        loss = cross_entropy(logits, targets, reduction="sum")
        is_greedy = (logits.argmax(-1) == targets).all()
        answers[branch.request] = (-float(loss), bool(is_greedy))
    return answers


@torch.inference_mode()
def mean_losses_of(model: Any, rows: Sequence[ScoredIds]) -> list[float]:
    """Return the mean loss of each row's scored ids in nats per token, with the code of the score during training."""

    def losses_of(ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        targets = labels != IGNORED
        logits = _logits(model, ids, targets.nonzero())
        return cross_entropy(logits, labels[targets], reduction="none")

    means: list[float] = batch_means(rows, losses_of, model.device).tolist()
    return means


def _logits(model: Any, ids: torch.Tensor, places: torch.Tensor, **options: torch.Tensor) -> torch.Tensor:
    """Return the logits after the ids with the row and column numbers `places` [n, 2], of shape [n, vocabulary]."""
    row, column = places.to(model.device).T

    def select(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return inputs[0][row, column]

    with model.get_output_embeddings().register_forward_pre_hook(select):
        logits: torch.Tensor = model(input_ids=ids, use_cache=False, **options).logits.float()
    return logits


def _padded(rows: Sequence[list[int]], device: torch.device) -> torch.Tensor:
    """Return rows of numbers as a tensor. Padding is on the right, so no position of a row attends to it."""
    tensors = [torch.tensor(row) for row in rows]
    return pad_sequence(tensors, batch_first=True).to(device)

"""Forward passes of an evaluation: the log-probabilities of texts, without logits that no score needs.

The functions take a model and a batch of texts, so that other processes can call them (evaluation/workers.py).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

from gpt2_repro.evaluation.hellaswag import ScoredIds, batch_means
from gpt2_repro.evaluation.shared_rows import Branch, Row
from gpt2_repro.tokens import IGNORED


Answer = tuple[float, bool]  # a log-probability, and whether greedy decoding gives the scored ids


@torch.inference_mode()
def score_rows(model: Any, rows: Sequence[Row]) -> dict[int, Answer]:
    """Return the answers of a batch, by the number of the request."""
    device = model.device
    ids = _padded([row.ids for row in rows], device)
    branches: list[Branch] = []
    places: list[tuple[int, int]] = []  # row and column of each scored position
    for number, row in enumerate(rows):
        for branch in row.branches:
            branches.append(branch)
            for column in branch.columns:
                places.append((number, column))
    attention: dict[str, Tensor] = {}
    if len(branches) > len(rows):
        attention = _attention_in_branches(rows, ids.shape[1], device)
    all_logits = _logits(model, ids, torch.tensor(places), **attention)
    sizes = [len(branch.targets) for branch in branches]
    answers: dict[int, Answer] = {}
    for branch, logits in zip(branches, all_logits.split(sizes), strict=True):
        targets = torch.tensor(branch.targets, device=device)
        loss = cross_entropy(logits, targets, reduction="sum")
        log_probability = -float(loss)
        is_greedy = (logits.argmax(-1) == targets).all()
        answers[branch.request] = (log_probability, bool(is_greedy))
    return answers


def _attention_in_branches(rows: Sequence[Row], length: int, device: torch.device) -> dict[str, Tensor]:
    """Return the arguments of a forward pass over rows with several branches, which do not attend to each other."""
    masks = [row.mask(length) for row in rows]
    mask = torch.stack(masks).unsqueeze(1)  # the same for all heads
    positions = [row.positions for row in rows]
    return {
        "position_ids": _padded(positions, device),
        "attention_mask": mask.to(device),
    }


@torch.inference_mode()
def mean_losses_of(model: Any, rows: Sequence[ScoredIds]) -> list[float]:
    """Return the mean loss of each row's scored ids in nats per token, with the code of the score during training."""

    def losses_of(ids: Tensor, labels: Tensor) -> Tensor:
        targets = labels != IGNORED
        logits = _logits(model, ids, targets.nonzero())
        return cross_entropy(logits, labels[targets], reduction="none")

    means: list[float] = batch_means(rows, losses_of, model.device).tolist()
    return means


def _logits(model: Any, ids: Tensor, places: Tensor, **options: Tensor) -> Tensor:
    """Return the logits after the ids with the row and column numbers `places` [n, 2], of shape [n, vocabulary]."""
    row, column = places.to(model.device).T

    def select(_: torch.nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
        hidden = inputs[0]
        return hidden[row, column]

    head = model.get_output_embeddings()
    with head.register_forward_pre_hook(select):
        outputs = model(input_ids=ids, use_cache=False, **options)
    logits: Tensor = outputs.logits
    return logits.float()


def _padded(rows: Sequence[list[int]], device: torch.device) -> Tensor:
    """Return rows of numbers as a tensor. Padding is on the right, so no position of a row attends to it."""
    tensors = [torch.tensor(row) for row in rows]
    return pad_sequence(tensors, batch_first=True).to(device)

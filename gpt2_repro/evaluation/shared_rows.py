"""Put texts with a common beginning into one row, so that the beginning is computed once."""

import os
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


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

    def mask(self, length: int) -> Tensor:
        """Return which id attends to which, of shape [length, length]."""
        seen = torch.tril(torch.ones(length, length, dtype=torch.bool))
        for branch in self.branches:
            seen[branch.start : branch.end, branch.shared : branch.start] = False
        return seen


def rows_of(texts: Sequence[Text], *, most: int, shared: bool) -> list[Row]:
    """Return rows of texts. If `shared`, texts with a common beginning share a row of at most `most` ids."""
    rows: list[Row] = []
    for text in sorted(texts):  # texts with a common beginning are neighbours
        if shared and rows and rows[-1].add(text, most=most):
            continue
        rows.append(Row(text))
    return rows

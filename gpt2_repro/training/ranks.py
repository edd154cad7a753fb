"""Collectives between the CPUs of all ranks. No GPU waits for them."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Ranks:
    """The processes of a run. All methods are collective: call them on all ranks, in the same order."""

    def __init__(self) -> None:
        self._group: Any = None

    @property
    def number(self) -> int:
        """The number of ranks."""
        return dist.get_world_size() if dist.is_initialized() else 1

    def largest(self, number: int) -> int:
        """Return the largest `number` of all ranks."""
        return number if self.number == 1 else int(self.table(torch.tensor([number])).max())

    def table(self, values: Tensor) -> Tensor:
        """Gather the `values` [n] of all ranks, which lie on the CPU, as [ranks, n]."""
        if not dist.is_initialized():
            return values[None]
        if self._group is None:
            self._group = dist.group.WORLD if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")
        rows = [torch.empty_like(values) for _ in range(self.number)]
        dist.all_gather(rows, values, group=self._group)
        return torch.stack(rows)

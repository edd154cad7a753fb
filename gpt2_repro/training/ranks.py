"""What ranks tell each other from CPU to CPU, which no GPU has to wait for."""

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
        """How many there are."""
        return dist.get_world_size() if dist.is_initialized() else 1

    def largest(self, number: int) -> int:
        """The largest number that a rank names."""
        return number if self.number == 1 else int(self.table(torch.tensor([number])).max())

    def table(self, values: Tensor) -> Tensor:
        """What each rank has to say: its `values` [n] on the CPU, in its row of the result [ranks, n]."""
        if not dist.is_initialized():
            return values[None]
        if self._group is None:
            self._group = dist.group.WORLD if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")
        rows = [torch.empty_like(values) for _ in range(self.number)]
        dist.all_gather(rows, values, group=self._group)
        return torch.stack(rows)

"""Gather small tensors from the CPUs of all ranks.

The functions are collectives: call them on all ranks in the same order.
"""

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def largest(number: int) -> int:
    """Return the maximum of `number` over all ranks."""
    return int(gather(torch.tensor([number])).max())


def gather(values: Tensor) -> Tensor:
    """Return the CPU tensors `values` (shape [n]) of all ranks, as shape [ranks, n]."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return values[None]
    rows = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    # The GPUs do not wait for a collective of gloo.
    dist.all_gather(rows, values, group=dist.group.WORLD if dist.get_backend() == "gloo" else _gloo_group())
    return torch.stack(rows)


@functools.cache
def _gloo_group() -> Any:
    return dist.new_group(backend="gloo")

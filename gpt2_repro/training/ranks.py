"""Gather small tensors from the CPUs of all ranks.

The functions are collectives: call them on all ranks in the same order. The GPUs do not wait for these functions.
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
    """Return the `values` of all ranks as a tensor of shape [ranks, n].

    Args:
        values: a tensor of shape [n] on the CPU.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return values[None]
    rows = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, values, group=dist.group.WORLD if dist.get_backend() == "gloo" else _gloo_group())
    return torch.stack(rows)


@functools.cache
def _gloo_group() -> Any:
    return dist.new_group(backend="gloo")

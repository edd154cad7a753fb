"""Collectives between the CPUs of all ranks, and the check that all hold the same weights. No GPU waits for them."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gpt2_repro.errors import RunFailed
from gpt2_repro.training.engine import has_shards


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


PIECE = 1 << 22  # weights
INTEGERS = {2: torch.int16, 4: torch.int32}  # as wide as a weight


def require_same_weights(model: torch.nn.Module, ranks: Ranks, *, step: int) -> None:
    """Compare the bits of all weights between all ranks. A collective.

    Shards are no replicas: each is held once, and there is nothing to compare it with.

    Raises RunFailed where they differ: the gradients of such a step are no one's, and its checkpoint neither.
    """
    if has_shards(model):
        return
    table = ranks.table(fingerprints(model))
    differs = (table != table[0]).nonzero().tolist()
    if not differs:
        return
    odd = sorted({rank for rank, _ in differs})
    first = [name for name, _ in model.named_parameters()][min(tensor for _, tensor in differs)]
    told = f"at step {step} the weights of rank {', '.join(map(str, odd))} are not those of rank 0, first in {first}"
    raise RunFailed(
        f"{told}: a GPU or its link is faulty. Start again with NCCL_P2P_DISABLE=1, or on another machine."
    )


@torch.no_grad()
def fingerprints(model: torch.nn.Module) -> Tensor:
    """The sum of each weight's bits, read as integers [weights]: a flipped bit changes it, and the order of adding not."""
    return torch.stack([_sum_of_bits(weight) for weight in model.parameters()]).cpu()


def _sum_of_bits(weight: Tensor) -> Tensor:
    bits = weight.view(INTEGERS[weight.element_size()]).flatten()
    # In pieces: torch makes a copy in int64 of what it adds.
    return torch.stack([piece.sum(dtype=torch.int64) for piece in bits.split(PIECE)]).sum()

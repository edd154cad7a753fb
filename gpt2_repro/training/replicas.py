"""All ranks hold the same weights: where they do not, a device, its memory or a link gives wrong values."""

import torch
from torch import Tensor

from gpt2_repro.errors import RunFailed
from gpt2_repro.training.ranks import Ranks
from gpt2_repro.training.sharding import has_shards


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

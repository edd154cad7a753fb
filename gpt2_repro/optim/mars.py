"""Define MARS-AdamW: AdamW with gradients that are corrected by their change."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


GAMMA, BETAS = 0.025, (0.95, 0.99)  # of the authors, for GPT-2 small
LEARNING_RATE_OF_VECTORS = 0.5  # relative to that of the matrices


class MarsAdamW(torch.optim.AdamW):
    """MARS-AdamW for all matrices (including embeddings), and AdamW for all vectors.

    The method is by Yuan et al. 2024 (arXiv:2411.10438). The constants are those of their GPT-2 small
    (github.com/AGI-Arena/MARS at 4831e28). As in the paper's approximate variant, the gradient of the previous step is
    stored, and not computed again on the current batch.

    Under ZeRO-1 and ZeRO-2, the weights of a group are this rank's part of one flat tensor.

    Args:
        params: parameter groups, each with a `weight_decay`.
        lr: learning rate of the matrices. The vectors use LEARNING_RATE_OF_VECTORS times this rate.
        betas: the betas for the vectors. The matrices use BETAS.
    """

    param_groups: list[dict[str, Any]]

    def __init__(self, params: Iterable[dict[str, Any]], *, lr: float, **adamw: Any) -> None:
        groups = []
        for group in params:
            matrices = [weight for weight in group["params"] if weight.ndim > 1]
            vectors = [weight for weight in group["params"] if weight.ndim <= 1]
            sizes = [weight.numel() for weight in matrices]
            groups += [group | {"params": matrices, "by": "mars", "sizes": sizes, "betas": BETAS}] if matrices else []
            if vectors:
                groups += [group | {"params": vectors, "by": "adamw", "lr_factor": LEARNING_RATE_OF_VECTORS}]
        super().__init__(groups, lr=lr, fused=True, **adamw)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Update all weights that have a gradient."""
        originals: list[tuple[Tensor, Tensor]] = []
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            if group["by"] != "mars" or not weights:
                continue
            gradients = [weight.grad for weight in weights]
            corrected = [self._correct(weight, group["betas"][0]) for weight in weights]
            _clip(corrected, group["sizes"] if weights[0].ndim == 1 else None)
            for weight, gradient in zip(weights, corrected, strict=True):
                weight.grad = gradient
            originals += zip(weights, gradients, strict=True)
        super().step()
        skipped = getattr(self, "found_inf", None)  # set on the device for updates that are not finite
        for weight, gradient in originals:
            weight.grad = gradient
            if skipped is None:
                self.state[weight]["last_grad"] = gradient.clone()
            else:
                last = self.state[weight].setdefault("last_grad", torch.zeros_like(gradient))
                last.copy_(torch.where(skipped.bool(), last, gradient))

    def _correct(self, weight: Tensor, beta: float) -> Tensor:
        """Return the gradient plus a multiple of its change since the previous step."""
        state, gradient = self.state[weight], weight.grad
        if "last_grad" not in state and state:
            return gradient.clone()  # a checkpoint that was converted to another number of processes lacks it
        last = state.get("last_grad", torch.zeros_like(gradient))
        return gradient + (gradient - last) * (GAMMA * beta / (1 - beta))


def _clip(gradients: Sequence[Tensor], sizes: Sequence[int] | None) -> None:
    """Scale each gradient to a norm of at most 1.

    Args:
        sizes: the number of elements of each weight, if `gradients` is one flat tensor with this rank's part of all
            gradients. Otherwise None.
    """
    if sizes is None:
        parts, norms = list(gradients), torch.stack([gradient.norm() for gradient in gradients])
    else:
        [flat] = gradients
        begin = dist.get_rank() * len(flat)
        ends = [sum(sizes[: number + 1]) - begin for number in range(len(sizes))]
        parts = [flat[max(0, end - size) : max(0, end)] for end, size in zip(ends, sizes, strict=True)]
        squares = torch.stack([part.square().sum() for part in parts])
        dist.all_reduce(squares)
        norms = squares.sqrt()
    for part, norm in zip(parts, norms, strict=True):
        part.div_(norm.clamp(min=1))

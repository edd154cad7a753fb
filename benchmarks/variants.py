"""Variants of the model that compute the same numbers with other kernels. Each changes a model before its first pass.

The gain of a variant is predicted from the kernels that torch.compile generates. `VARIANTS[name](model)` turns it on.
"""

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D


class _BiasGradient(torch.autograd.Function):
    """Pass a projection through, and sum the gradient of its bias over the positions of a row first."""

    @staticmethod
    def forward(ctx: Any, projection: Tensor, bias: Tensor) -> Tensor:
        ctx.dtype = bias.dtype
        return projection.view_as(projection)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        per_row = gradients[0].sum(1, dtype=torch.float32)
        return gradients[0], per_row.sum(0).to(ctx.dtype)


def _project(self: Conv1D, inputs: Tensor) -> Tensor:
    """Replace Conv1D.forward."""
    projection = torch.addmm(self.bias.detach(), inputs.view(-1, inputs.shape[-1]), self.weight)
    return _BiasGradient.apply(projection.view(*inputs.shape[:-1], self.nf), self.bias)


def row_bias_sums(model: PreTrainedModel) -> None:
    """Sum the bias gradients of a GPT-2 where they are computed.

    Inductor (torch 2.13) splits a sum over all positions in a way that cannot be fused: it writes the gradient of GELU,
    and of queries, keys and values, and reads it again. A sum over the positions of a row is fused.
    """
    for block in model.base_model.h:
        for projection in (block.attn.c_attn, block.mlp.c_fc):
            projection.forward = MethodType(_project, projection)


VARIANTS: dict[str, Callable[[PreTrainedModel], None]] = {"row_bias_sums": row_bias_sums}

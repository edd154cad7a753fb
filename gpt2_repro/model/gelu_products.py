"""The MLP of a GPT-2 whose GELU is computed inside the products, by cuBLASLt (package nvmath-python).

The product with `c_fc` also adds the bias and applies GELU. In the backward pass, the product with `c_proj` also
multiplies by the derivative of GELU and sums the gradient of the bias. cuBLASLt has GELU's tanh approximation.
"""

import logging
from typing import Any

import torch
from torch import Tensor

from gpt2_repro.model.packed_attention import product_dtype


WIDTH_MULTIPLE = 8  # of the width of the MLP: cuBLASLt pads other sizes of saved tensors
WORKSPACE_BYTES = 32 * 2**20  # torch's limit for cuBLASLt on Hopper
ALIGNMENT = 256  # bytes; a better alignment does not matter to cuBLASLt

_products: dict[Any, Any] = {}  # objects of nvmath.linalg.advanced.Matmul

# nvmath logs each call, and measures it with a host sync if its logger is on.
_quiet = logging.getLogger("gpt2_repro.nvmath")
_quiet.setLevel(logging.WARNING)


def gelu_mlp(inputs: Tensor, up_weight: Tensor, up_bias: Tensor, down_weight: Tensor, down_bias: Tensor) -> Tensor:
    """Return `gelu(inputs @ up_weight + up_bias) @ down_weight + down_bias`, with the tanh approximation of GELU.

    Products use autocast's dtype if autocast is on, otherwise the dtype of `inputs`.

    Args:
        inputs: the hidden states, of shape [tokens, width].
        up_weight: the weight of `c_fc`, of shape [width, 4 * width].
        down_weight: the weight of `c_proj`, of shape [4 * width, width].
    """
    dtype = product_dtype(inputs)
    return _GeluMlp.apply(
        inputs.to(dtype), up_weight.to(dtype), up_bias.to(dtype), down_weight.to(dtype), down_bias.to(dtype)
    )


class _GeluMlp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, up_weight: Tensor, up_bias: Tensor, down_weight: Tensor, down_bias: Tensor
    ) -> Tensor:
        inputs = inputs.contiguous()
        before, after = gelu_product(inputs, up_weight, up_bias)
        ctx.save_for_backward(inputs, up_weight, down_weight, before, after)
        return torch.addmm(down_bias, after, down_weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        inputs, up_weight, down_weight, before, after = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        grad_before, grad_up_bias = gelu_gradient_product(gradient, down_weight, before)
        grad_inputs = grad_before @ up_weight.T
        grad_up_weight = inputs.T @ grad_before
        grad_down_weight = after.T @ gradient
        return grad_inputs, grad_up_weight, grad_up_bias, grad_down_weight, gradient.sum(0)


# Opaque operators for torch.compile, which would otherwise trace the calls of nvmath.
@torch.library.custom_op("gpt2_repro::gelu_product", mutates_args=())
def gelu_product(inputs: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return `inputs @ weight + bias` and its GELU, both of shape [tokens, 4 * width]."""
    return run_gelu_product(inputs, weight, bias)


@gelu_product.register_fake
def _empty_products(inputs: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    before = inputs.new_empty(len(inputs), len(bias))
    return before, torch.empty_like(before)


@torch.library.custom_op("gpt2_repro::gelu_gradient_product", mutates_args=())
def gelu_gradient_product(gradient: Tensor, weight: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient of `before`, which was the input of GELU, and that of the bias that was added to it.

    `gradient` is the gradient [tokens, width] of the product of GELU's output and `weight` [4 * width, width].
    """
    return run_gelu_gradient_product(gradient, weight, before)


@gelu_gradient_product.register_fake
def _empty_gradients(gradient: Tensor, weight: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(before), before.new_empty(len(weight))


# cuBLASLt applies GELU only to results in column-major order. So both products are computed transposed.
def run_gelu_product(inputs: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `gelu_product` with cuBLASLt."""
    after, further = _multiply("GELU_AUX_BIAS", weight.T, inputs.T, {"bias": bias})
    before = further["gelu_aux"]
    return before.T, after.T


def run_gelu_gradient_product(gradient: Tensor, weight: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `gelu_gradient_product` with cuBLASLt."""
    grad_before, further = _multiply("DGELU_BGRAD", weight, gradient.T, {"gelu_aux": before.T})
    return grad_before.T, further["dgelu_bgrad"]


def _multiply(epilog: str, left: Tensor, right: Tensor, epilog_inputs: dict[str, Tensor]) -> Any:
    """Return the product of two matrices after `epilog`, and the further results of `epilog` by name."""
    layouts: list[Any] = []
    for tensor in (left, right):
        alignment = min(ALIGNMENT, tensor.data_ptr() & -tensor.data_ptr())
        layouts.append((tensor.dtype, tensor.shape, tensor.stride(), alignment))
    identity = (epilog, left.device, *layouts)
    product = _products.get(identity)
    if product is None:
        product = _plan(epilog, left, right, epilog_inputs)
        _products[identity] = product
    else:
        # `identity` contains what reset_operands would check.
        product.reset_operands_unchecked(a=left, b=right, epilog_inputs=epilog_inputs)
    results = product.execute()
    product.release_operands()  # otherwise they stay in memory until the next call
    return results


def _plan(epilog: str, left: Tensor, right: Tensor, epilog_inputs: dict[str, Tensor]) -> Any:
    from nvmath.linalg.advanced import Matmul, MatmulEpilog, MatmulOptions, MatmulPlanPreferences

    options = MatmulOptions(memory_limit=WORKSPACE_BYTES, logger=_quiet)
    product = Matmul(left, right, options=options)
    preferences = MatmulPlanPreferences(limit=1)  # the first algorithm is used, and others could need more workspace
    product.plan(preferences=preferences, epilog=MatmulEpilog[epilog], epilog_inputs=epilog_inputs)
    return product

"""Kernels of other packages for GPT-2's attention, MLP and loss, as functions that torch.compile accepts."""

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def flash_attention_4() -> Callable[[Tensor, float], Tensor]:
    """Return causal attention [rows, T, heads, head size] of a projection [rows, T, 3, heads, head size] and a scale.

    The kernel reads one tensor with queries, keys and values, and writes the gradient into one tensor. The gradients of
    other kernels are copied into one. The functions of flash-attn-4 (4.0.0b10 to b36) are private: the public ones
    cannot be compiled by torch.compile.
    """
    interface = importlib.import_module("flash_attn.cute.interface")

    @torch.library.custom_op("benchmarks::flash4", mutates_args=())
    def flash4(joint: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        out, log_sums = empty_results(joint, scale)
        query, key, value = joint.unbind(2)
        interface._flash_attn_fwd(query, key, value, softmax_scale=scale, causal=True, out=out, lse=log_sums)
        return out, log_sums

    @flash4.register_fake
    def empty_results(joint: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        rows, length, _, heads, head_size = joint.shape
        out = joint.new_empty(rows, length, heads, head_size)
        log_sums = joint.new_empty(rows, heads, length, dtype=torch.float32)
        return out, log_sums

    @torch.library.custom_op("benchmarks::flash4_backward", mutates_args=())
    def backward(gradient: Tensor, joint: Tensor, out: Tensor, log_sums: Tensor, scale: float) -> Tensor:
        query, key, value = joint.unbind(2)
        result = torch.empty_like(joint)
        dq, dk, dv = result.unbind(2)
        interface._flash_attn_bwd(
            query, key, value, out, gradient, log_sums, softmax_scale=scale, causal=True, dq=dq, dk=dk, dv=dv
        )
        return result

    @backward.register_fake
    def empty_gradient(gradient: Tensor, joint: Tensor, out: Tensor, log_sums: Tensor, scale: float) -> Tensor:
        return torch.empty_like(joint)

    def save(ctx: Any, inputs: tuple[Tensor, float], output: tuple[Tensor, Tensor]) -> None:
        joint, ctx.scale = inputs
        ctx.save_for_backward(joint, *output)

    def differentiate(ctx: Any, gradient: Tensor, _: Any) -> tuple[Tensor, None]:
        joint, out, log_sums = ctx.saved_tensors
        return backward(gradient, joint, out, log_sums, ctx.scale), None

    flash4.register_autograd(differentiate, setup_context=save)

    def attend(joint: Tensor, scale: float) -> Tensor:
        out, _ = flash4(joint, scale)
        return out

    return attend


def quack_mlp(*, tuned: bool = False) -> Callable[..., Tensor]:
    """Return GPT-2's MLP with QuACK's products for Hopper (quack-kernels 0.6.5).

    The returned function takes hidden states [rows, T, width], and weights and biases of `c_fc` and `c_proj`. The package
    cutlass must be in a folder with the name site-packages. Otherwise QuACK raises a TypeError about `_LOC_TRANSFORMS`.

    The product of `c_fc` also adds the bias and applies GELU. In the backward pass, the product of the gradient and
    `c_proj` also applies GELU's gradient, sums the gradient of the bias, and computes GELU again.

    Args:
        tuned: time sizes of tiles at the first call. Otherwise QuACK's default for Hopper is used.
    """
    products = importlib.import_module("quack.gemm_interface")
    backward_product = importlib.import_module("quack.epilogue.library").dgelu_dbias_mod

    @torch.library.custom_op("benchmarks::expand", mutates_args=())
    def expand(inputs: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """Return the input and the output of GELU [tokens, 4 * width]."""
        return products.gemm_act(inputs, weight, bias=bias, activation="gelu_tanh_approx", tuned=tuned)

    @expand.register_fake
    def empty_products(inputs: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        before = inputs.new_empty(len(inputs), len(bias))
        return before, torch.empty_like(before)

    @torch.library.custom_op("benchmarks::contract_backward", mutates_args=())
    def contract_backward(gradient: Tensor, weight: Tensor, before: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradient of the input of GELU, the output of GELU, and the gradient of the bias in fp32."""
        results = backward_product(gradient, weight.T, before, tuned=tuned)
        return results["D"], results["postact"], results["dbias"]

    @contract_backward.register_fake
    def empty_gradients(gradient: Tensor, weight: Tensor, before: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        grad_bias = before.new_empty(len(weight), dtype=torch.float32)
        return torch.empty_like(before), torch.empty_like(before), grad_bias

    class MLP(torch.autograd.Function):
        @staticmethod
        def forward(
            ctx: Any, inputs: Tensor, up_weight: Tensor, up_bias: Tensor, down_weight: Tensor, down_bias: Tensor
        ) -> Tensor:
            before, after = expand(inputs.flatten(0, -2), up_weight, up_bias)
            ctx.save_for_backward(inputs, up_weight, down_weight, before)
            out = torch.addmm(down_bias, after, down_weight)
            return out.view_as(inputs)

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
            inputs, up_weight, down_weight, before = ctx.saved_tensors
            [gradient] = gradients
            flat = gradient.flatten(0, -2).contiguous()
            grad_before, after, grad_up_bias = contract_backward(flat, down_weight, before)
            grad_inputs = (grad_before @ up_weight.T).view_as(inputs)
            grad_up_weight = inputs.flatten(0, -2).T @ grad_before
            grad_down_weight = after.T @ flat
            grad_down_bias = gradient.sum((0, 1))
            return grad_inputs, grad_up_weight, grad_up_bias.to(up_weight.dtype), grad_down_weight, grad_down_bias

    return MLP.apply


def quack_softmax() -> Callable[[Tensor, Tensor, int], Tensor]:
    """Return `softmax_kernel.replace_by_gradient` with QuACK's kernel.

    The kernel holds a row in the memory of four processors.
    """
    kernel = importlib.import_module("quack.cross_entropy").cross_entropy_fwd_out

    def replace_by_gradient(logits: Tensor, labels: Tensor, vocab_size: int) -> Tensor:
        logits[:, vocab_size:] = -torch.inf
        losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
        kernel(logits, labels, None, losses, None, logits, None)
        return losses

    return replace_by_gradient

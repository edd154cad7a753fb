"""Make the functions that kernels.py compares.

The functions of a group take the same tensors and return the same result:

attention  projection [rows, T, 3 * width] -> [rows, T, width]
MLP        inputs [rows, T, width], weights and biases of c_fc and c_proj (of Conv1D: [in, out]) -> [rows, T, width]
loss       hidden states [tokens, width], labels [tokens], embedding [padded vocabulary, width] -> sum in nats

In the group of products, a function returns the passes of one layer, see `Passes`.
"""

import importlib
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import AttentionInterface, GPT2Config, GPT2LMHeadModel

from benchmarks import fused_kernels
from benchmarks.kernel_plan import Shapes
from gpt2_repro.model import pretraining
from gpt2_repro.tokens import IGNORED


Function = Callable[..., Tensor]


def causal_cudnn(shapes: Shapes) -> Function:
    return _sdpa("causal_cudnn", shapes)


def causal_sdpa(shapes: Shapes) -> Function:
    return _sdpa("causal_sdpa", shapes)


def _sdpa(name: str, shapes: Shapes) -> Function:
    """Return an attention of transformers' interface. torch copies the three gradients into one tensor."""
    torch.backends.cuda.enable_cudnn_sdp(False)  # as in training: causal_cudnn turns it on
    attend = AttentionInterface()[name]
    module = nn.Module()
    module.is_causal = True

    def attention(projection: Tensor) -> Tensor:
        parts = projection.split(shapes.width, dim=2)
        query, key, value = (_by_head(part, shapes).transpose(1, 2) for part in parts)
        out, _ = attend(module, query, key, value, None, dropout=0.0, scaling=shapes.head_size**-0.5)
        return out.flatten(2)

    return compile_for_training(attention)


def _by_head(tensor: Tensor, shapes: Shapes) -> Tensor:
    return tensor.unflatten(2, (shapes.heads, shapes.head_size))


def _joint(projection: Tensor, shapes: Shapes) -> Tensor:
    return projection.unflatten(2, (3, shapes.heads, shapes.head_size))


def packed_attention(shapes: Shapes) -> Function:
    attend = importlib.import_module("gpt2_repro.model.packed_attention").packed_attention

    def attention(projection: Tensor) -> Tensor:
        return attend(projection, shapes.heads)

    return compile_for_training(attention)


def flash_attention_2(shapes: Shapes) -> Function:
    attend = importlib.import_module("flash_attn.flash_attn_interface").flash_attn_qkvpacked_func

    def attention(projection: Tensor) -> Tensor:
        out = attend(_joint(projection, shapes), causal=True)
        return out.flatten(2)

    return compile_for_training(attention)


def flash_attention_4(shapes: Shapes) -> Function:
    attend = fused_kernels.flash_attention_4()

    def attention(projection: Tensor) -> Tensor:
        out = attend(_joint(projection, shapes), shapes.head_size**-0.5)
        return out.flatten(2)

    return compile_for_training(attention)


def torch_mlp(shapes: Shapes) -> Function:
    """Return the MLP of the model, with bias gradients that are summed by row."""
    config = GPT2Config(
        n_embd=shapes.width,
        n_head=shapes.heads,
        n_layer=1,
        vocab_size=8,
        bos_token_id=0,
        eos_token_id=0,
        activation_function="gelu_pytorch_tanh",
        resid_pdrop=0.0,
    )
    model = GPT2LMHeadModel(config)
    pretraining.sum_biases_by_row(model)
    module = model.base_model.h[0].mlp

    def mlp(inputs: Tensor, up_weight: Tensor, up_bias: Tensor, down_weight: Tensor, down_bias: Tensor) -> Tensor:
        weights = {
            "c_fc.weight": up_weight,
            "c_fc.bias": up_bias,
            "c_proj.weight": down_weight,
            "c_proj.bias": down_bias,
        }
        return functional_call(module, weights, (inputs,))

    return compile_for_training(mlp)


def gelu_mlp(shapes: Shapes) -> Function:
    multiply = importlib.import_module("gpt2_repro.model.gelu_products").gelu_mlp

    def mlp(inputs: Tensor, *weights: Tensor) -> Tensor:
        out = multiply(inputs.flatten(0, 1), *weights)
        return out.view_as(inputs)

    return compile_for_training(mlp)


def quack_mlp(shapes: Shapes) -> Function:
    return compile_for_training(fused_kernels.quack_mlp())


def _our_loss(shapes: Shapes) -> Function:
    def loss(hidden: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
        return pretraining.chunked_cross_entropy(hidden, weight, labels, vocab_size=shapes.vocab_size)

    return compile_for_training(loss)


def triton_loss(shapes: Shapes) -> Function:
    return _our_loss(shapes)


def torch_loss(shapes: Shapes) -> Function:
    """Return the loss of a machine without Triton."""
    return _replaced(_our_loss(shapes), pretraining, "TRITON_DEVICES", ())


def quack_loss(shapes: Shapes) -> Function:
    """Return our loss with QuACK's softmax instead of the Triton kernel."""
    from gpt2_repro.model import softmax_kernel  # imports Triton, which is only there with CUDA

    softmax = fused_kernels.quack_softmax()
    return _replaced(_our_loss(shapes), softmax_kernel, "replace_by_gradient", softmax)


def _replaced(function: Function, module: object, name: str, value: object) -> Function:
    """Return a function that runs while an attribute of a module is replaced."""

    def run(*tensors: Tensor) -> Tensor:
        original = getattr(module, name)
        setattr(module, name, value)
        try:
            return function(*tensors)
        finally:
            setattr(module, name, original)

    return run


def liger_loss(shapes: Shapes) -> Function:
    """Return Liger's loss without vocabulary padding, which it cannot exclude from the softmax."""
    package = importlib.import_module("liger_kernel.transformers.fused_linear_cross_entropy")
    multiply = package.LigerFusedLinearCrossEntropyLoss(
        ignore_index=IGNORED, reduction="sum", accum_dtype=torch.float32
    )

    def loss(hidden: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
        return multiply(weight[: shapes.vocab_size], hidden, labels)

    return loss


def compile_for_training(function: Function) -> Function:
    """Compile a function as training does, if there is a GPU."""
    if not torch.cuda.is_available():
        return function
    return torch.compile(function, fullgraph=True, dynamic=False)


class Passes(NamedTuple):
    """The matrix products of a layer: the output, and the gradients of inputs and weight."""

    products: list[Callable[[], object]]
    flops: int  # of each product


def products_of_c_attn(tokens: int, shapes: Shapes, device: str) -> Passes:
    return _products(tokens, shapes.width, 3 * shapes.width, device)


def products_of_attention_projection(tokens: int, shapes: Shapes, device: str) -> Passes:
    return _products(tokens, shapes.width, shapes.width, device)


def products_of_c_fc(tokens: int, shapes: Shapes, device: str) -> Passes:
    return _products(tokens, shapes.width, 4 * shapes.width, device)


def products_of_mlp_projection(tokens: int, shapes: Shapes, device: str) -> Passes:
    return _products(tokens, 4 * shapes.width, shapes.width, device)


def _products(tokens: int, width: int, out_width: int, device: str) -> Passes:
    inputs = torch.randn(tokens, width, device=device, dtype=torch.bfloat16)
    gradient = torch.randn(tokens, out_width, device=device, dtype=torch.bfloat16)
    weight = torch.randn(width, out_width, device=device, dtype=torch.bfloat16)
    products = [lambda: inputs @ weight, lambda: gradient @ weight.T, lambda: inputs.T @ gradient]
    return Passes(products, flops=2 * tokens * width * out_width)


def products_of_head(tokens: int, shapes: Shapes, device: str) -> Passes:
    """Return the products of the loss, which computes the logits of some tokens at a time."""
    inputs = torch.randn(tokens, shapes.width, device=device, dtype=torch.bfloat16)
    weight = torch.randn(shapes.padded_vocab_size, shapes.width, device=device, dtype=torch.bfloat16)
    chunks = inputs.split(pretraining.chunk_size(weight))
    gradient = torch.randn(len(chunks[0]), len(weight), device=device, dtype=torch.bfloat16)

    def forward() -> None:
        for chunk in chunks:
            torch.mm(chunk, weight.T)

    def grad_inputs() -> None:
        for chunk in chunks:
            torch.mm(gradient[: len(chunk)], weight)

    def grad_weight() -> None:
        for chunk in chunks:
            pretraining._fp32_product(gradient[: len(chunk)].T, chunk)

    return Passes([forward, grad_inputs, grad_weight], flops=2 * tokens * shapes.width * len(weight))

"""Check that the implementation of the MLP that a recipe requests can be used."""

import importlib.util
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import gelu
from transformers import PreTrainedConfig

from gpt2_repro.errors import UserError, in_a_line
from gpt2_repro.model.arguments import GPT2, MlpImplementation
from gpt2_repro.model.attention import MOST_DIFFERENCE, Machine, largest_difference
from gpt2_repro.model.gelu_products import WIDTH_MULTIPLE, gelu_mlp
from gpt2_repro.model.packed_attention import LENGTH_MULTIPLE


TANH_GELU = ("gelu_new", "gelu_pytorch_tanh")
TOKENS = 256  # of the comparison with torch


def require_mlp(
    requested: MlpImplementation, machine: Machine, config: PreTrainedConfig, *, has_whole_weights: bool = True
) -> None:
    """Raise UserError if the requested implementation cannot be used, or gives other results than torch.

    Args:
        has_whole_weights: whether each process has all weights, so not under ZeRO-3 and FSDP2.
    """
    if requested == "torch":
        return
    problem = obstacle(machine, config)
    if problem is None and not has_whole_weights:
        problem = "ZeRO-3 and FSDP2 divide the weights among the GPUs"
    if problem is None:
        problem = find_failure(machine, config)
    if problem is not None:
        fix = "Pass --mlp_implementation torch."
        raise UserError(f"--mlp_implementation {requested} cannot be used: {problem}. {fix}")


def obstacle(machine: Machine, config: PreTrainedConfig) -> str | None:
    """Return why cuBLASLt cannot compute the MLPs of a model, or None if it can."""
    if config.model_type != GPT2:
        return "it needs --model_type gpt2"
    if config.activation_function not in TANH_GELU:
        return f"cuBLASLt has no {config.activation_function}"
    width = config.n_inner or 4 * config.hidden_size
    if width % WIDTH_MULTIPLE:
        return f"the width {width} of the MLP is not a multiple of {WIDTH_MULTIPLE}"
    if not machine.cuda or torch.version.hip is not None:
        return "there is no NVIDIA GPU"
    if not (machine.bf16 or machine.fp16):
        return "it needs bf16 or fp16, which this run does not use"
    if machine.length % LENGTH_MULTIPLE:
        return f"the length of the rows is not a multiple of {LENGTH_MULTIPLE}"
    if importlib.util.find_spec("nvmath") is None:
        return "nvmath-python is not installed (requirements-gpu.txt)"
    return None


def find_failure(machine: Machine, config: PreTrainedConfig) -> str | None:
    """Return how the MLP of cuBLASLt fails, or differs from that of torch, or None."""
    try:
        difference = largest_difference(_results(gelu_mlp, machine, config), _results(_torch_mlp, machine, config))
    except Exception as error:  # nvmath and cuda.bindings raise errors of their own
        message = in_a_line(error)[:200]
        return f"it fails on this machine ({message})"
    if difference > MOST_DIFFERENCE:
        return f"it differs from torch by {difference:.3f}"
    return None


def _torch_mlp(inputs: Tensor, up_weight: Tensor, up_bias: Tensor, down_weight: Tensor, down_bias: Tensor) -> Tensor:
    before = torch.addmm(up_bias, inputs, up_weight)
    after = gelu(before, approximate="tanh")
    return torch.addmm(down_bias, after, down_weight)


def _results(mlp: Callable[..., Tensor], machine: Machine, config: PreTrainedConfig) -> list[Tensor]:
    """Return the output and the gradients of an MLP with random weights."""
    device = "cpu"
    if machine.cuda:
        device = "cuda"
    dtype = torch.float16
    if machine.bf16:
        dtype = torch.bfloat16
    generator = torch.Generator(device).manual_seed(0)
    width = config.hidden_size
    inner_width = config.n_inner or 4 * width
    shapes = [(TOKENS, width), (width, inner_width), (inner_width,), (inner_width, width), (width,)]
    scales = [1.0, width**-0.5, 1.0, inner_width**-0.5, 1.0]  # of the results, about 1
    tensors: list[Tensor] = []
    for shape, scale in zip(shapes, scales, strict=True):
        tensor = torch.randn(shape, generator=generator, device=device) * scale
        tensors.append(tensor.to(dtype).requires_grad_())
    direction = torch.randn(shapes[0], generator=generator, device=device).to(dtype)
    out = mlp(*tensors)
    gradients = torch.autograd.grad(out, tensors, direction)
    return [out.detach(), *gradients]

"""Causal attention on the projection of a GPT-2, whose gradient is written into one tensor.

torch's SDPA writes the gradients of queries, keys and values into three tensors, which are then copied into the gradient
of the projection. The package nvidia-cudnn-frontend runs the same kernels of cuDNN with strides of our choice.
"""

import functools
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


# Other lengths are wrong in some versions of cuDNN (see make_pretraining).
LENGTH_MULTIPLE = 128
HEAD_SIZE_MULTIPLE = 8
MOST_HEAD_SIZE = 128
DTYPES = (torch.bfloat16, torch.float16)


class Graph(NamedTuple):
    """A kernel of cuDNN for tensors with certain shapes and strides."""

    graph: Any  # cudnn.pygraph
    nodes: list[Any]  # its inputs and outputs
    workspace_bytes: int


_graphs: dict[Any, Graph] = {}


def product_dtype(hidden: Tensor) -> torch.dtype:
    """Return the dtype of products with `hidden`: that of autocast, if autocast is on."""
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return hidden.dtype


def is_training_batch(hidden: Tensor) -> bool:
    """Return whether hidden states [rows, T, width] have the precision and the length of training.

    Other passes, for example of generated text, have many different shapes, and each one would need its own plan.
    """
    return hidden.shape[1] % LENGTH_MULTIPLE == 0 and product_dtype(hidden) in DTYPES


def packed_attention(projection: Tensor, heads: int) -> Tensor:
    """Return causal attention [rows, T, width] of a projection [rows, T, 3 * width] to queries, keys and values."""
    out, _ = attend(projection.contiguous(), heads)
    return out


def run_forward(query: Tensor, key: Tensor, value: Tensor, out: Tensor, log_sums: Tensor) -> None:
    """Write the attention to `out`, and the logarithms of the sums of the softmax to `log_sums`.

    `log_sums` is fp32 [rows, heads, T, 1]. The other tensors are [rows, heads, T, head size] with any strides.
    """
    _execute(_describe_forward, [query, key, value, out, log_sums])


def run_backward(
    query: Tensor, key: Tensor, value: Tensor, out: Tensor, log_sums: Tensor, gradient: Tensor, results: list[Tensor]
) -> None:
    """Write the gradients of queries, keys and values to `results`. `gradient` is the gradient of `out`."""
    _execute(_describe_backward, [query, key, value, out, log_sums, gradient, *results])


def _execute(describe: Callable[..., tuple[Any, list[Any]]], tensors: list[Tensor]) -> None:
    """Run the kernel that `describe` describes on tensors, on torch's current stream."""
    import cudnn

    device = tensors[0].device
    thread = threading.get_ident()
    handle = _handle(device, thread)
    stream = torch.cuda.current_stream(device).cuda_stream
    cudnn.set_stream(handle, stream)
    layouts = [(tensor.dtype, tensor.shape, tensor.stride()) for tensor in tensors]
    identity = (device, thread, *layouts)
    if identity not in _graphs:
        graph, nodes = describe(handle, tensors)
        graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        _graphs[identity] = Graph(graph, nodes, graph.get_workspace_size())
    graph, nodes, workspace_bytes = _graphs[identity]
    workspace = torch.empty(workspace_bytes, dtype=torch.uint8, device=device)
    buffers = dict(zip(nodes, tensors, strict=True))
    graph.execute(buffers, workspace, handle=handle)


@functools.cache
def _handle(device: torch.device, thread: int) -> Any:
    """Return the handle of cuDNN of a thread: torch runs the backward pass on another thread than the forward pass."""
    import cudnn

    with torch.cuda.device(device):
        return cudnn.create_handle()


def _new_graph(handle: Any, dtype: torch.dtype) -> Any:
    import cudnn

    io_type = cudnn.data_type.HALF
    if dtype == torch.bfloat16:
        io_type = cudnn.data_type.BFLOAT16
    return cudnn.pygraph(
        io_data_type=io_type,
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
        handle=handle,
    )


def _describe_output(node: Any, tensor: Tensor) -> None:
    node.set_output(True)
    node.set_dim(list(tensor.shape))
    node.set_stride(list(tensor.stride()))


def _describe_forward(handle: Any, tensors: list[Tensor]) -> tuple[Any, list[Any]]:
    """Return the graph of the forward pass and its inputs and outputs, in the order of `tensors`."""
    import cudnn

    query, key, value, out, log_sums = tensors
    graph = _new_graph(handle, query.dtype)
    inputs = [graph.tensor_like(tensor) for tensor in (query, key, value)]
    out_node, log_sums_node = graph.sdpa(
        q=inputs[0],
        k=inputs[1],
        v=inputs[2],
        attn_scale=_scale(query),
        use_causal_mask=True,
        generate_stats=True,
    )
    _describe_output(out_node, out)
    _describe_output(log_sums_node, log_sums)
    log_sums_node.set_data_type(cudnn.data_type.FLOAT)
    return graph, [*inputs, out_node, log_sums_node]


def _describe_backward(handle: Any, tensors: list[Tensor]) -> tuple[Any, list[Any]]:
    """Return the graph of the backward pass and its inputs and outputs, in the order of `tensors`."""
    query = tensors[0]
    graph = _new_graph(handle, query.dtype)
    inputs = [graph.tensor_like(tensor) for tensor in tensors[:6]]
    outputs = graph.sdpa_backward(
        q=inputs[0],
        k=inputs[1],
        v=inputs[2],
        o=inputs[3],
        stats=inputs[4],
        dO=inputs[5],
        attn_scale=_scale(query),
        use_causal_mask=True,
    )
    for node, tensor in zip(outputs, tensors[6:], strict=True):
        _describe_output(node, tensor)
    return graph, [*inputs, *outputs]


def _scale(query: Tensor) -> float:
    head_size = query.shape[-1]
    return head_size**-0.5


def _split(projection: Tensor, heads: int) -> tuple[Tensor, ...]:
    """Return queries, keys and values [rows, heads, T, head size] as views of a projection [rows, T, 3 * width]."""
    rows, length, _ = projection.shape
    parts = projection.view(rows, length, 3, heads, -1)
    return parts.permute(2, 0, 3, 1, 4).unbind()


def _by_head(tensor: Tensor, heads: int) -> Tensor:
    """Return a tensor [rows, T, width] as a view [rows, heads, T, head size]."""
    rows, length, _ = tensor.shape
    return tensor.view(rows, length, heads, -1).transpose(1, 2)


# An opaque operator for torch.compile, which would otherwise trace the calls of cuDNN.
@torch.library.custom_op("gpt2_repro::packed_attention", mutates_args=())
def attend(projection: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Return the attention [rows, T, width], and what the backward pass needs of the softmax. See `run_forward`."""
    out, log_sums = _empty_results(projection, heads)
    query, key, value = _split(projection, heads)
    run_forward(query, key, value, _by_head(out, heads), log_sums)
    return out, log_sums


@attend.register_fake
def _empty_results(projection: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    rows, length, parts = projection.shape
    out = projection.new_empty(rows, length, parts // 3)
    log_sums = projection.new_empty(rows, heads, length, 1, dtype=torch.float32)
    return out, log_sums


@torch.library.custom_op("gpt2_repro::packed_attention_backward", mutates_args=())
def attend_backward(gradient: Tensor, projection: Tensor, out: Tensor, log_sums: Tensor, heads: int) -> Tensor:
    """Return the gradient of the projection [rows, T, 3 * width]."""
    query, key, value = _split(projection, heads)
    grad_projection = torch.empty_like(projection)
    results = list(_split(grad_projection, heads))
    run_backward(query, key, value, _by_head(out, heads), log_sums, _by_head(gradient, heads), results)
    return grad_projection


@attend_backward.register_fake
def _empty_gradient(gradient: Tensor, projection: Tensor, out: Tensor, log_sums: Tensor, heads: int) -> Tensor:
    return torch.empty_like(projection)


def _save(ctx: Any, inputs: tuple[Tensor, int], output: tuple[Tensor, Tensor]) -> None:
    projection, ctx.heads = inputs
    out, log_sums = output
    ctx.mark_non_differentiable(log_sums)
    ctx.save_for_backward(projection, out, log_sums)


def _differentiate(ctx: Any, gradient: Tensor, _: Any) -> tuple[Tensor, None]:
    projection, out, log_sums = ctx.saved_tensors
    grad_projection = attend_backward(gradient.contiguous(), projection, out, log_sums, ctx.heads)
    return grad_projection, None


attend.register_autograd(_differentiate, setup_context=_save)

"""Compile the training loss with torch.compile, and describe the compiled graphs."""

import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._inductor.runtime.cache_dir_utils import default_cache_dir
from torch.fx import GraphModule, Node
from transformers import PreTrainedModel

from gpt2_repro.errors import in_a_line


logger = logging.getLogger(__name__)

# Next to the runs and not in /tmp, which a rented machine loses when it stops.
CACHE = ".cache/inductor"
# flash-attn's operations: on rows, and on documents by their lengths (varlen).
FLASH = re.compile("flash_attn_?(varlen_)?(forward|fwd)")


class Graph(NamedTuple):
    """Number of attention calls in a compiled graph, and whether it outputs logits."""

    training: bool
    causal: int  # attention calls in which the kernel applies the causal mask
    masked: int  # attention calls that get a mask tensor, such as a document mask
    logits: bool  # whether an output is as wide as the vocabulary


def compile_loss(model: PreTrainedModel, *, backend: str = "inductor") -> list[Graph]:
    """Compile a model's pre-training loss into a single graph.

    `model` must be the result of `make_pretraining`. If the compilation fails, the model switches to the attention
    kernel causal_sdpa and is compiled again. If the compilation fails with causal_sdpa, the error is raised.

    Compiled code is cached in $TORCHINDUCTOR_CACHE_DIR (default: .cache/inductor).

    Returns the list `model.compiled_graphs`. Each newly compiled graph is added to this list.
    """
    # Importing transformers sets this variable to torch's default in /tmp. That value is replaced, too.
    if os.environ.get("TORCHINDUCTOR_CACHE_DIR") in (None, default_cache_dir()):
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(CACHE).resolve())
    recomputed = "skip_fwd_side_effects_in_bwd_under_checkpoint"
    if model.balance_loss is not None and hasattr(torch._dynamo.config, recomputed):
        # Hooks collect router logits in the forward pass. They need not run again when blocks are recomputed.
        setattr(torch._dynamo.config, recomputed, True)
    compiler = torch._dynamo.lookup_backend(backend)
    graphs: list[Graph] = []

    def watched(graph: GraphModule, inputs: list[Any], **options: Any) -> Any:
        graphs.append(describe_graph(graph, vocab_size=model.config.vocab_size))
        kind = "training" if graphs[-1].training else "validation"
        logger.info(
            "compiling the %s step; compiled code is cached in %s", kind, os.environ["TORCHINDUCTOR_CACHE_DIR"]
        )
        return compiler(graph, inputs, **options)

    # Only the loss: DDP and DeepSpeed wrap an ordinary module, and sampling and scoring have changing input shapes.
    compiled = torch.compile(model.summed_loss, backend=watched, fullgraph=True, dynamic=False)

    def compiled_loss(input_ids: Tensor, shift_labels: Tensor, **attention: Any) -> Tensor:
        try:
            return compiled(input_ids, shift_labels, **attention)
        except torch._dynamo.exc.TorchDynamoException as error:
            if (kernel := model.config._attn_implementation) == "causal_sdpa":
                raise
            logger.warning(
                "The attention kernel %s cannot be compiled (%s). The run uses the kernel causal_sdpa instead.",
                kernel,
                in_a_line(error)[:200],
            )
            graphs.clear()
            model.set_attn_implementation("causal_sdpa")
            attention = model.documents.attention(model, input_ids) if model.documents else {}
            return compiled(input_ids, shift_labels, **attention)

    model.summed_loss = compiled_loss
    model.compiled_graphs = graphs
    return graphs


def describe_graph(graph: GraphModule, *, vocab_size: int) -> Graph:
    """Count a graph's attention calls, and find out whether it outputs logits.

    `graph` is a graph of torch.compile before lowering.
    """
    attentions = [node for node in _calls(graph) if "scaled_dot_product_attention" in str(node.target)]
    # flash-attn takes no mask. The same graph contains its backward operation, which FLASH does not match.
    flash = [node for node in _calls(graph) if FLASH.search(str(node.target))]
    masked = sum(node.kwargs.get("attn_mask") is not None or len(node.args) > 3 for node in attentions)
    causal = sum(bool(node.kwargs.get("is_causal")) for node in attentions)
    causal += sum(bool(node.kwargs.get("causal")) for node in flash)
    (output,) = graph.graph.find_nodes(op="output")
    shapes = [node.meta["example_value"].shape for node in output.all_input_nodes if "example_value" in node.meta]
    return Graph(torch.is_grad_enabled(), causal, masked, any(shape[-1:] == (vocab_size,) for shape in shapes))


def _calls(graph: GraphModule) -> Iterator[Node]:
    """Yield the function calls in a torch.compile graph and in its subgraphs."""
    # Layers that are recomputed (activation checkpointing) are subgraphs.
    for module in graph.modules():
        if isinstance(module, GraphModule):
            yield from (node for node in module.graph.nodes if node.op == "call_function")

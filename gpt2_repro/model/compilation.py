"""torch.compile for the loss: what was asked of it, and what the compiled graphs really hold.

Only `summed_loss` is compiled, inside whatever wraps the model: sampling and scoring, with their changing shapes, keep
the stock forward, and DDP and DeepSpeed see an ordinary module.
"""

import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch._inductor.runtime.cache_dir_utils import default_cache_dir
from torch.fx import GraphModule, Node
from transformers import PreTrainedModel


logger = logging.getLogger(__name__)

# Beside the runs, not in /tmp: a rented machine forgets that when it stops.
CACHE = ".cache/inductor"
# flash-attn's operations, on whole rows and on documents by their lengths.
FLASH = re.compile("_flash_attn_(varlen_)?forward")


class Graph(NamedTuple):
    """One compiled graph of the loss."""

    training: bool
    causal: int  # attentions that the kernel itself makes causal
    masked: int  # attentions that are handed a mask, of documents where they are kept apart
    logits: bool  # whether it returns something as wide as the vocabulary


def compile_loss(model: PreTrainedModel, *, backend: str = "inductor") -> list[Graph]:
    """Compile the loss of a model from `make_pretraining`.

    A graph that breaks in two raises: the whole loss is one graph, or the run says so. Compiled code is kept in
    $TORCHINDUCTOR_CACHE_DIR, by default `.cache/inductor` of the working directory.

    Returns the list in which a graph appears when it is first needed; `model.compiled_graphs` is the same list.
    """
    # Importing transformers already writes torch's own default, in /tmp, into the environment.
    if os.environ.get("TORCHINDUCTOR_CACHE_DIR") in (None, default_cache_dir()):
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(CACHE).resolve())
    recomputed = "skip_fwd_side_effects_in_bwd_under_checkpoint"
    if model.balance_loss is not None and hasattr(torch._dynamo.config, recomputed):
        # Hooks collect what routers say in the forward pass, and need not do so again where blocks are computed twice.
        setattr(torch._dynamo.config, recomputed, True)
    compiler = torch._dynamo.lookup_backend(backend)
    graphs: list[Graph] = []

    def watched(graph: GraphModule, inputs: list[Any], **options: Any) -> Any:
        graphs.append(describe_graph(graph, vocab_size=model.config.vocab_size))
        kind = "training" if graphs[-1].training else "validation"
        logger.info("compiling the %s step; the cache is %s", kind, os.environ["TORCHINDUCTOR_CACHE_DIR"])
        return compiler(graph, inputs, **options)

    model.summed_loss = torch.compile(model.summed_loss, backend=watched, fullgraph=True, dynamic=False)
    model.compiled_graphs = graphs
    return graphs


def describe_graph(graph: GraphModule, *, vocab_size: int) -> Graph:
    """What a graph of torch.compile, before it is lowered, says of attention and logits."""
    attentions = [node for node in _calls(graph) if "scaled_dot_product_attention" in str(node.target)]
    # flash-attn takes no mask, and its backward operation stands in the same graph.
    flash = [node for node in _calls(graph) if FLASH.search(str(node.target))]
    masked = sum(node.kwargs.get("attn_mask") is not None or len(node.args) > 3 for node in attentions)
    causal = sum(bool(node.kwargs.get("is_causal")) for node in attentions)
    causal += sum(bool(node.kwargs.get("causal")) for node in flash)
    (output,) = graph.graph.find_nodes(op="output")
    shapes = [node.meta["example_value"].shape for node in output.all_input_nodes if "example_value" in node.meta]
    return Graph(torch.is_grad_enabled(), causal, masked, any(shape[-1:] == (vocab_size,) for shape in shapes))


def _calls(graph: GraphModule) -> Iterator[Node]:
    """Calls of functions in a graph and in the graphs it holds, as those of recomputed layers."""
    for module in graph.modules():
        if isinstance(module, GraphModule):
            yield from (node for node in module.graph.nodes if node.op == "call_function")

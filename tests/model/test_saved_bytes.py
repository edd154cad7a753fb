"""Preflight estimates the bytes that the compiled loss saves for the backward pass on CUDA.

No GPU is needed: the loss is traced on fake tensors, with CUDA's attention operation.
"""

import itertools
from typing import Any

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses import FakeTensorMode
from transformers import AttentionInterface

from gpt2_repro.model.build import build_model
from gpt2_repro.model.configuration import build_config
from gpt2_repro.model.pretraining import sum_biases_by_row
from gpt2_repro.planning.memory import MemoryEstimate, MemoryTrial
from gpt2_repro.recipe import load_recipe
from tests.commands import ROOT


def fused(
    module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float | None = None, **kwargs: Any
) -> Any:
    key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], 1) for each in (key, value))
    q, k, v = (each.bfloat16() for each in (query, key, value))  # as autocast on CUDA
    attend = torch.ops.aten._scaled_dot_product_flash_attention
    return attend(q, k, v, 0.0, True, scale=scaling)[0].transpose(1, 2), None


AttentionInterface.register("causal_fused", fused)


def saved_bytes(section: Any, *, rows: int, dtype: torch.dtype) -> int:
    """Return the bytes that the forward graph saves. They are those of the graphs that inductor would get."""
    graphs: list[Any] = []
    compiler = {name: lambda graph, _: graphs.append(graph.graph) or graph for name in ("fw_compiler", "bw_compiler")}
    table, partition = select_decomp_table(), min_cut_rematerialization_partition
    backend = aot_autograd(**compiler, partition_fn=partition, decompositions=table)
    torch._dynamo.reset()
    with FakeTensorMode(allow_non_fake_inputs=True):
        config = build_config(section, sequence_length=1024, vocab_size=50_257)
        model = build_model(config, attention="causal_fused").train()
        if config.model_type == "gpt2":
            sum_biases_by_row(model)  # as compile_loss does on a GPU
        cast: dict[Any, Any] = {}
        for module in model.modules():  # `to` cannot change the dtype of fake parameters
            for name, weight in module._parameters.items():
                if weight is not None:
                    other = torch.nn.Parameter(torch.empty(weight.shape, dtype=dtype))
                    module._parameters[name] = cast.setdefault(weight, other)
        loss = torch.compile(model.summed_loss, backend=backend, fullgraph=True, dynamic=False)
        ids = torch.zeros(rows, 1024, dtype=torch.long)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
            loss(ids, ids).backward()
    forward, _ = graphs
    saved = {node for node in forward.find_nodes(op="output")[0].args[0] if hasattr(node, "meta")}
    values = [node.meta["val"] for node in saved if node.op != "placeholder"]
    return sum(value.numel() * value.element_size() for value in values if isinstance(value, torch.Tensor))


TWO_BLOCKS = "--n_layer 2"
# The derived width of the MLP depends on the number of layers. The estimate is for the width of the recipes.
LLAMA = f"ladder/4_swiglu.yaml {TWO_BLOCKS} --config_overrides intermediate_size=2048"
EXPERTS = "num_local_experts=8,num_experts_per_tok=2,intermediate_size=1024"
MIXTRAL = f"ladder/7_moe.yaml {TWO_BLOCKS} --config_overrides {EXPERTS}"
SHAPES = [f"gpt2_124m.yaml {TWO_BLOCKS}", "gpt2_124m.yaml", f"gpt2_1558m.yaml {TWO_BLOCKS}", LLAMA, MIXTRAL]
# bf16 weights as under ZeRO-1, and fp32 weights with autocast as under DDP.
CASES = list(itertools.product(SHAPES, (torch.bfloat16, torch.float32)))


@pytest.mark.skipif(torch.__version__ < "2.10", reason="torch 2.9 cannot trace the loss of this test")
@pytest.mark.parametrize(
    ("recipe", "dtype"), [CASES[0], *(pytest.param(*case, marks=pytest.mark.slow) for case in CASES[1:])]
)
def test_preflight_estimates_the_saved_bytes(recipe: str, dtype: torch.dtype) -> None:
    model = load_recipe(f"{ROOT}/recipes/{recipe}".split()).model
    few, many = (saved_bytes(model, rows=rows, dtype=dtype) for rows in (4, 8))
    states = {"parameters": 0, "ranks": 1, "sharded": dtype == torch.bfloat16, "chunk": 0, "vocab_size": 0}
    shape = {name: getattr(model, name) for name in ("model_type", "n_layer", "n_embd")}
    estimate = MemoryEstimate(**shape, **states, sequence_length=1024)
    expected = estimate.bytes_of(MemoryTrial(8)) - estimate.bytes_of(MemoryTrial(4))
    assert many - few == pytest.approx(expected, rel=0.005)

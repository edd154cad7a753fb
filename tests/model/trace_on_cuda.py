"""Trace the compiled loss of a recipe's model on fake CUDA tensors, without a GPU.

    python tests/model/trace_on_cuda.py STUB DTYPE ROWS RECIPE [--key value …]

STUB is the library compiled from `STUB_SOURCE`. DTYPE is the dtype of the weights: bfloat16 as under ZeRO-1, or
float32 with autocast as under DDP. The graphs are those that inductor would get. Prints a JSON object.
"""

import ctypes
import json
import sys
import types
from typing import Any
from unittest import mock


# A CPU wheel of torch has no device guard for CUDA, which the autograd engine needs also for fake tensors.
STUB_SOURCE = """
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace c10::impl {
struct FakeGuard : NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Device exchangeDevice(Device) const override { return Device(DeviceType::CUDA, 0); }
  Device getDevice() const override { return Device(DeviceType::CUDA, 0); }
  Stream getStream(Device device) const noexcept override { return Stream(Stream::DEFAULT, device); }
  Stream getDefaultStream(Device device) const override { return Stream(Stream::DEFAULT, device); }
  Stream exchangeStream(Stream stream) const noexcept override { return stream; }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, FakeGuard);
}
namespace at {
struct CUDAHooks : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
};
REGISTER_CUDA_HOOKS(CUDAHooks);
}
"""


def main(stub: str, dtype: str, rows: int, *recipe: str) -> None:
    """Print the graphs' operations and the bytes saved for backward.

    `head` lists the operations whose result is an fp32 tensor with the shape of the output embedding.
    """
    ctypes.CDLL(stub, ctypes.RTLD_GLOBAL)  # before torch is imported
    import torch
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table
    from torch._subclasses import FakeTensorMode
    from transformers import AttentionInterface

    from gpt2_repro.model.build import build_model, sum_biases_by_row
    from gpt2_repro.model.configuration import build_config
    from gpt2_repro.planning.recipe import load_recipe

    def fused(module: Any, q: Any, k: Any, v: Any, mask: Any, scaling: float | None = None, **kwargs: Any) -> Any:
        k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], 1) for each in (k, v))
        attend = torch.ops.aten._scaled_dot_product_flash_attention
        return attend(q, k, v, 0.0, True, scale=scaling)[0].transpose(1, 2), None

    torch.cuda.get_device_capability = lambda *_: (9, 0)  # of an H100; experts look at it
    properties = types.SimpleNamespace(total_memory=24e9)
    torch.cuda.get_device_properties = lambda *_: properties
    with mock.patch.multiple(torch.cuda, is_available=lambda: True, is_bf16_supported=lambda: True):
        autocast = torch.autocast("cuda", torch.bfloat16, enabled=dtype == "float32")
    AttentionInterface.register("causal_fused", fused)  # without a GPU, SDPA would choose its plain implementation
    graphs: list[Any] = []

    def keep(graph: Any, inputs: Any) -> Any:
        graphs.append(graph.graph)
        return graph

    table = select_decomp_table()
    backend = aot_autograd(
        fw_compiler=keep, bw_compiler=keep, partition_fn=min_cut_rematerialization_partition, decompositions=table
    )
    section, length = load_recipe(recipe).model, 1024
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cuda:0"):
        config = build_config(section, sequence_length=length, vocab_size=50_257)
        model = build_model(config, attention="causal_fused").train()
        if config.model_type == "gpt2":
            sum_biases_by_row(model)  # as compile_loss does on a GPU
        cast: dict[Any, Any] = {}
        for module in model.modules():  # `to` cannot change the dtype of fake parameters
            for name, weight in module._parameters.items():
                if weight is not None:
                    other = torch.nn.Parameter(torch.empty(weight.shape, dtype=getattr(torch, dtype)))
                    module._parameters[name] = cast.setdefault(weight, other)
        model.summed_loss = torch.compile(model.summed_loss, backend=backend, fullgraph=True, dynamic=False)
        ids = torch.zeros(rows, length, dtype=torch.long)
        with autocast:
            loss = model(input_ids=ids, shift_labels=ids).loss
        loss.backward()

    found: dict[str, Any] = {"operations": []}
    for graph in graphs:
        calls = [node for node in graph.nodes if node.op == "call_function"]
        found["operations"].append(sorted({str(node.target) for node in calls}))
    head = model.get_output_embeddings().weight.shape
    made = [node for node in graphs[0].nodes if isinstance(node.meta.get("val"), torch.Tensor)]
    sums = [node for node in made if (node.meta["val"].shape, node.meta["val"].dtype) == (head, torch.float32)]
    found["head"] = [str(node.target) for node in sums if node.op == "call_function"]
    saved = {node for node in graphs[0].find_nodes(op="output")[0].args[0] if hasattr(node, "meta")}
    values = [node.meta["val"] for node in saved if node.op != "placeholder"]
    found["saved"] = sum(value.numel() * value.element_size() for value in values if isinstance(value, torch.Tensor))
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), *sys.argv[4:])

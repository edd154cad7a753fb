"""Run train.py with a profile of one step, or with a change that has no option. gpu.py starts it.

BENCHMARK_PATCH=profile BENCHMARK_FILE=profile.json accelerate launch … benchmarks/patched_train.py RECIPE …
"""

import collections
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import torch


sys.path.insert(0, str(Path(__file__).parents[1]))

PROFILED_STEP = 8
# The first pattern that a kernel's name contains decides its group. Names of Triton kernels list the operations that
# the compiler has joined, so the last groups are approximate.
GROUPS = {
    "attention": "sdpa|flash|fmha|fwd_kernel|bwd_kernel|attention",
    "matrix products": "nvjet|gemm|cutlass|cublas|splitk|aten::.*mm",
    "communication": "nccl|gloo|c10d",
    "loss": "softmax|exp(?!and)|amax|gather|nll",
    "GELU": "tanh|gelu",
    "LayerNorm": "layer_norm|rsqrt",
    "optimizer, clipping and sums of gradients": "multi_tensor|adam|lamb|foreach|norm",
    "copies": "memcpy|memset|copy|cat|fill|clone|to_copy",
}


def group_of(kernel: str) -> str:
    """Return the group of a kernel, by its name."""
    return next((group for group, pattern in GROUPS.items() if re.search(pattern, kernel, re.IGNORECASE)), "other")


def summarize(spans: list[tuple[float, float, str]]) -> dict[str, Any]:
    """Return the time of each group and of the largest kernels, from (start, end, name) in microseconds."""
    groups, total, calls = (collections.Counter[str]() for _ in range(3))
    spans = sorted(spans)
    busy, until = 0.0, spans[0][0]
    for start, end, name in spans:
        groups[group_of(name)] += end - start
        total[name] += end - start
        calls[name] += 1
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    return {
        "ms": (until - spans[0][0]) / 1e3,
        "no kernel": (until - spans[0][0] - busy) / 1e3,
        "groups": {name: time / 1e3 for name, time in groups.most_common()},
        "kernels": [
            {"name": name, "group": group_of(name), "ms": time / 1e3, "calls": calls[name]}
            for name, time in total.most_common(60)
        ],
    }


def profile() -> None:
    """Profile step PROFILED_STEP of the training, and write the summary to $BENCHMARK_FILE."""
    from torch.autograd import DeviceType
    from transformers import TrainerCallback

    from gpt2_repro.training import build

    add_callbacks = build.add_callbacks

    class Profile(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if not state.is_world_process_zero or state.global_step not in (PROFILED_STEP - 1, PROFILED_STEP):
                return
            on_gpu = torch.cuda.is_available()
            if on_gpu:
                torch.cuda.synchronize()
            if state.global_step < PROFILED_STEP:
                self.profiler = torch.profiler.profile()
                self.profiler.start()
                return
            self.profiler.stop()
            device = DeviceType.CUDA if on_gpu else DeviceType.CPU  # without a GPU: operations, which contain others
            events = self.profiler.events()
            spans = [(e.time_range.start, e.time_range.end, e.name) for e in events if e.device_type == device]
            summary = summarize(spans)
            summary["host syncs"] = sum(bool(re.match("cuda.*Synchronize", event.name)) for event in events)
            summary["allocated_bytes"] = torch.cuda.max_memory_allocated() if on_gpu else 0
            Path(os.environ["BENCHMARK_FILE"]).write_text(json.dumps(summary, indent=1), encoding="utf-8")

    def add(trainer: Any) -> None:
        add_callbacks(trainer)
        trainer.add_callback(Profile())

    build.add_callbacks = add


def flash_attention_4() -> None:
    """Compute GPT-2's attention with FlashAttention-4, without dropout and masks."""
    from torch import Tensor
    from transformers.models.gpt2.modeling_gpt2 import GPT2Attention

    from benchmarks import fused_kernels

    attend = fused_kernels.flash_attention_4()
    stock = GPT2Attention.forward

    def forward(self: Any, hidden_states: Tensor, past_key_values: Any = None, **others: Any) -> Any:
        if past_key_values is not None or hidden_states.dtype == torch.float32:  # samples, the check at the start
            return stock(self, hidden_states, past_key_values, **others)
        joint = self.c_attn(hidden_states)
        out = attend(joint.view(*joint.shape[:-1], 3, -1, self.head_dim), self.scaling)
        return self.resid_dropout(self.c_proj(out.flatten(2))), None

    GPT2Attention.forward = forward


def quack_mlp() -> None:
    """Compute GPT-2's MLP with QuACK's products. With QUACK_PRINT_AUTOTUNING=1, sizes of tiles are timed and printed."""
    from torch import Tensor
    from transformers.models.gpt2.modeling_gpt2 import GPT2MLP

    from benchmarks import fused_kernels

    mlp = fused_kernels.quack_mlp(tuned=os.environ.get("QUACK_PRINT_AUTOTUNING") == "1")
    stock = GPT2MLP.forward

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        if hidden_states.dtype == torch.float32:  # the check at the start
            return stock(self, hidden_states)
        weights = (each for layer in (self.c_fc, self.c_proj) for each in (layer.weight, layer.bias))
        return self.dropout(mlp(hidden_states, *weights))

    GPT2MLP.forward = forward


def quack_loss() -> None:
    """Replace logits by their gradient with QuACK's kernel."""
    from benchmarks import fused_kernels
    from gpt2_repro.model import softmax_kernel

    softmax_kernel.replace_by_gradient = fused_kernels.quack_softmax()


def torch_softmax() -> None:
    """Compute the loss without the Triton kernel."""
    from gpt2_repro.model import pretraining

    pretraining.use_torch_softmax()


def check_copies() -> None:
    """Compare the files of saves in the background with the tensors, and append the results to $BENCHMARK_FILE."""
    from benchmarks import check_copies as checks

    checks.install(Path(os.environ["BENCHMARK_FILE"]))


if __name__ == "__main__":
    from gpt2_repro import cli
    from gpt2_repro.train import main

    for name in os.environ["BENCHMARK_PATCH"].split():  # functions of this file
        globals()[name]()
    cli.run(main, prints_results=False)

"""Run train.py with a profile of one step, or with a change that has no option. gpu.py starts it.

BENCHMARK_PATCH=profile BENCHMARK_FILE=profile.json accelerate launch … benchmarks/patched_train.py RECIPE …
"""

import collections
import dataclasses
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


def profile(file: Path) -> None:
    """Profile step PROFILED_STEP of the training, and write the summary to a file."""
    from torch.autograd import DeviceType
    from transformers import TrainerCallback

    from gpt2_repro.training import run

    add_callbacks = run.add_callbacks

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
            file.write_text(json.dumps(summary, indent=1), encoding="utf-8")

    def add(trainer: Any) -> None:
        add_callbacks(trainer)
        trainer.add_callback(Profile())

    run.add_callbacks = add


def no_recompute() -> None:
    """Let the compiler save what the backward pass needs, and recompute nothing from it."""
    from torch._functorch import partitioners

    operations = partitioners.get_default_op_list
    partitioners.get_default_op_list = lambda: dataclasses.replace(operations(), recomputable_ops=set())


if __name__ == "__main__":
    from gpt2_repro import cli
    from gpt2_repro.train import main

    PATCHES = {
        "profile": lambda: profile(Path(os.environ["BENCHMARK_FILE"])),
        "no_recompute": no_recompute,
    }
    PATCHES[os.environ["BENCHMARK_PATCH"]]()
    cli.run(main, prints_results=False)

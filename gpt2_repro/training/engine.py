"""What stands between the Trainer and the hardware: DeepSpeed on a machine without GPU, and what the engine really is."""

import importlib.util
import os
import warnings
from typing import Any

import torch


def prepare_deepspeed(*, use_cpu: bool) -> None:
    """Tell DeepSpeed to compute on the CPU, where that is so, and to compile nothing there.

    Its shared-memory collective would take 26 s and a compiler to build, and hang for ever on a lock that a killed
    build left behind (deepspeed/comm/torch.py, 0.19.8). gloo serves as well.
    """
    # DeepSpeed 0.19.8 calls it on every step; torch 2.13 gave it another name.
    warnings.filterwarnings("ignore", message=".*all_gather_into_tensor.*", category=FutureWarning)
    if not use_cpu or importlib.util.find_spec("deepspeed") is None:
        return
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def describe_engine(wrapped: torch.nn.Module, optimizer: Any) -> dict[str, Any]:
    """What computes: engine, ZeRO stage, optimizer, and the dtypes of weights, masters and accumulation."""
    weights = next(wrapped.parameters())
    facts: dict[str, Any] = {
        "engine": type(wrapped).__name__,
        "zero_stage": None,
        "weights": _name(weights.dtype),
        "masters": _name(weights.dtype),
        "accumulation": _name(weights.dtype),
    }
    inner = getattr(optimizer, "optimizer", optimizer)
    if facts["engine"] == "DeepSpeedEngine":
        zero: Any = wrapped.optimizer
        accumulation = wrapped.get_data_types()[1]
        inner = getattr(zero, "optimizer", zero)
        facts |= {
            "zero_stage": wrapped.zero_optimization_stage(),
            "zero_optimizer": type(zero).__name__,
            "masters": _name(inner.param_groups[0]["params"][0].dtype),
            "accumulation": _name(accumulation),
            "clip": wrapped.gradient_clipping(),
        }
    return facts | {"optimizer": type(inner).__name__}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def fp32_weights(model: torch.nn.Module, *, keep: bool) -> dict[str, torch.Tensor]:
    """Every weight in fp32 on the CPU, from the masters where DeepSpeed holds them; {} for a rank that does not `keep`.

    A collective: call it on all ranks.
    """
    weights = {}
    for name, parameter in model.named_parameters():
        sharded = hasattr(parameter, "_hp_mapping")
        full = parameter.get_full_hp_param() if sharded else parameter.detach()
        if keep:
            weights[name] = full.to("cpu", torch.float32, copy=True)
    return weights

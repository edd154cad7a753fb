"""The engine below the Trainer: DeepSpeed on CPU, sharded weights, fp32 masters, and checks of what was built."""

import importlib.util
import logging
import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from gpt2_repro.batch_plan import BatchPlan
from gpt2_repro.errors import RunFailed, UserError
from gpt2_repro.training import ranks


logger = logging.getLogger(__name__)


def prepare_deepspeed(*, use_cpu: bool) -> None:
    """Make DeepSpeed compute on the CPU if `use_cpu`, and compile nothing there.

    Its shared-memory collective would need 26 s and a compiler to build, and would wait without end for the lock of a
    killed build (deepspeed/comm/torch.py, 0.19.8). gloo replaces it.
    """
    # DeepSpeed 0.19.8 calls them on every step; torch 2.13 gave them other names.
    warnings.filterwarnings("ignore", message=".*(all_gather_into|reduce_scatter)_tensor.*", category=FutureWarning)
    if not use_cpu or importlib.util.find_spec("deepspeed") is None:
        return
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def describe_engine(accelerator: Any, wrapped: nn.Module, inner: Any) -> dict[str, Any]:
    """Return processes, engine, ZeRO stage, optimizer, dtypes and clipping, read from the objects that were built.

    Args:
        accelerator: the Trainer's.
        wrapped: the model as the launcher's backend wrapped it.
        inner: see innermost_optimizer.
    """
    dtype = next(wrapped.parameters()).dtype
    weights = _name(dtype)
    autocast = accelerator.mixed_precision if accelerator.distributed_type != "DEEPSPEED" else "no"
    facts: dict[str, Any] = {
        "engine": type(wrapped).__name__,
        "processes": accelerator.num_processes,
        "zero_stage": None,
        "weights": weights,
        "products": "bfloat16" if autocast == "bf16" else weights,
        "masters": weights,
        "accumulation": weights,
    }
    if facts["engine"] == "DeepSpeedEngine":
        zero: Any = wrapped.optimizer
        # Weights that are updated. ZeRO-3 hands them to its optimizer piece by piece, at the step.
        groups = getattr(zero, "fp32_partitioned_groups_flat", None)
        masters = groups[0] if groups else inner.param_groups[0]["params"][0]
        facts |= {
            "zero_stage": wrapped.zero_optimization_stage(),
            "zero_optimizer": type(zero).__name__,
            "masters": _name(masters.dtype),
            "accumulation": _name(wrapped.get_data_types()[1]),
            "clip": zero.clip_grad,
            "rows_per_pass": wrapped.train_micro_batch_size_per_gpu(),
            "accumulation_steps": wrapped.gradient_accumulation_steps(),
        }
    if isinstance(wrapped, FSDPModule):
        policy: Any = wrapped._get_fsdp_state()._mp_policy
        products, sums = (_name(one or dtype) for one in (policy.param_dtype, policy.reduce_dtype))
        facts |= {"products": products, "accumulation": sums}
    return facts | {"optimizer": type(inner).__name__}


def innermost_optimizer(wrapped: nn.Module, optimizer: Any) -> Any:
    """Return torch's optimizer without the wrappers of accelerate and DeepSpeed."""
    outer: Any = wrapped.optimizer if type(wrapped).__name__ == "DeepSpeedEngine" else optimizer
    return getattr(outer, "optimizer", outer)


def fix_restored_optimizer(wrapped: nn.Module, optimizer: torch.optim.Optimizer, *, weight_decay: float) -> None:
    """Correct the restored optimizer state. For DeepSpeed 0.19.8 also:

    - The clipping limit: stages 1 to 3 restore the checkpoint's and ignore the configuration
      (runtime/zero/stage_1_and_2.py, `_load_global_state`; runtime/bf16_optimizer.py).
    - Universal form: step counts are on the CPU (runtime/base_optimizer.py), where the fused kernel does not take them.
    - Universal form, stage 3 (runtime/zero/stage3.py): all groups share one step count tensor, which each of them
      increments, and all get the first group's weight decay, which is that of matrices.
    """
    beside = any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
    for parameter, state in optimizer.state.items():
        if isinstance(step := state.get("step"), torch.Tensor):
            state["step"] = step.to(parameter.device if beside else step.device, copy=True)
    if type(wrapped).__name__ != "DeepSpeedEngine":
        return
    engine: Any = wrapped
    engine.optimizer.clip_grad = engine.gradient_clipping()
    if engine.zero_optimization_stage() == 3:
        # DeepSpeed drops a group without weights: an OLMo has matrices alone.
        for group, decay in zip(optimizer.param_groups, (weight_decay, 0.0), strict=False):
            group["weight_decay"] = decay


def zero_gradient_norm(wrapped: nn.Module) -> Callable[[], Any] | None:
    """Asks DeepSpeed for the norm of this step's gradients, which it knows when torch's optimizer is called.

    None without DeepSpeed.
    """
    if type(wrapped).__name__ != "DeepSpeedEngine":
        return None
    zero: Any = wrapped.optimizer
    return lambda: zero._global_grad_norm


def check_engine(facts: dict[str, Any], plan: BatchPlan, *, max_grad_norm: float, bf16: bool) -> None:
    """Compare the engine with the recipe.

    Raises UserError for a difference that changes the training, and warns of gradients summed in bf16.
    """
    products = "bfloat16" if bf16 else "float32"
    expected: dict[str, Any] = {"processes": plan.num_processes, "products": products, "masters": "float32"}
    if facts["zero_stage"] is not None:
        expected |= {"clip": max_grad_norm, "rows_per_pass": plan.micro_batch_size}
        expected |= {"accumulation_steps": plan.gradient_accumulation_steps}
    for key, value in expected.items():
        if facts[key] != value:
            told = f"The engine has {key} {facts[key]} and not {value}, which the recipe asks for."
            raise UserError(f"{told} Use a launcher file of accelerate_configs/.")
    if facts["accumulation"] == "bfloat16" and plan.gradient_accumulation_steps > 1:
        logger.warning("Gradients are summed in bf16. Set data_types.grad_accum_dtype to fp32 in the DeepSpeed JSON.")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def fp32_weights(model: nn.Module, *, keep: bool) -> dict[str, torch.Tensor]:
    """Every weight in fp32 on the CPU, from the masters where DeepSpeed holds them; {} for a rank that does not `keep`.

    A collective: call it on all ranks.
    """
    weights = {}
    for name, parameter in model.named_parameters():
        full = _full_master(parameter)
        if keep:
            weights[name] = full.to("cpu", torch.float32, copy=True)
    return weights


def _full_master(parameter: Any) -> torch.Tensor:
    if hasattr(parameter, "ds_id"):  # ZeRO-3
        return parameter._z3_optimizer.get_full_hp_param(parameter)
    if hasattr(parameter, "_hp_mapping"):  # ZeRO-1 and 2
        return parameter.get_full_hp_param()
    return whole(parameter.detach())


def has_shards(model: nn.Module) -> bool:
    """Return whether each process holds a part of every weight. A pass is then a collective."""
    return isinstance(model, FSDPModule) or hasattr(next(model.parameters()), "ds_id")


def build_whole() -> None:
    """Make transformers build whole models from now on. DeepSpeed's engine shards them.

    Under ZeRO-3 transformers (5.23, `get_init_context`) builds each model in shards: from other random numbers than under
    every other launcher, and on a single rank not at all. TrainingArguments set this, and Trainer sets it again.
    """
    unset_hf_deepspeed_config()


def allow_fsdp_on_cpu() -> None:
    """Make accelerate shard on CPU processes as on GPUs. It would silently leave FSDP out (1.15, state.py)."""
    PartialState()._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def shard_by_fsdp(model: nn.Module, accelerator: Any) -> None:
    """Shard the weights by FSDP2 if the launcher requests it. Each block is a unit, the rest another.

    Not by accelerate (1.15, `fsdp2_prepare_model`), which leaves a sharded model as it is: it would round the loss to bf16
    with all outputs, sum gradients over processes in bf16, and fetch tied embeddings after the call of a head that the
    loss never calls. Optimizer, norm and checkpoints stay accelerate's.
    """
    if getattr(accelerator.state, "fsdp_plugin", None) is None:
        return
    bf16 = accelerator.mixed_precision == "bf16"
    options = {
        "mesh": init_device_mesh(accelerator.device.type, (accelerator.num_processes,)),
        "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bf16 else MixedPrecisionPolicy(),
    }
    blocks: Any = next(part for part in model.base_model.children() if isinstance(part, nn.ModuleList))
    # By default the outermost part stays whole after a pass. Between two steps its fp32 masters could not be read.
    for part in (*blocks, model):
        fully_shard(part, reshard_after_forward=True, **options)
    if accelerator.device.type == "cpu":  # gloo has no mean
        for part in model.modules():
            if isinstance(part, FSDPModule):
                part.set_force_sum_reduction_for_comms(True)


def whole(value: Any) -> Any:
    """Return the full tensor of a DTensor, which is a collective; anything else as it is."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def require_same_weights(model: nn.Module, *, step: int) -> None:
    """Compare the bits of all weights between all ranks. A collective.

    A sharded weight is not replicated, so there is nothing to compare.

    Raises RunFailed if they differ: neither the gradients of such a step nor its checkpoint are valid.
    """
    if has_shards(model):
        return
    # XOR of the bits: a flipped bit changes it, and the order of the reduction does not.
    hashes = torch.stack([torch.hash_tensor(weight.detach()) for weight in model.parameters()])
    table = ranks.gather(hashes.view(torch.int64).cpu())
    differs = (table != table[0]).nonzero().tolist()
    if not differs:
        return
    odd = sorted({rank for rank, _ in differs})
    first = [name for name, _ in model.named_parameters()][min(tensor for _, tensor in differs)]
    told = f"At step {step} rank {', '.join(map(str, odd))} has other weights than rank 0, first in {first}."
    raise RunFailed(f"{told} A GPU or link is faulty. Set NCCL_P2P_DISABLE=1 or use another machine.")

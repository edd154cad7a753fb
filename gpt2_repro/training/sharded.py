"""Train with sharded weights: ZeRO-3 and FSDP2."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp
from transformers.integrations.deepspeed import unset_hf_deepspeed_config


def has_shards(model: nn.Module) -> bool:
    """Return whether weights are sharded, so that a forward pass is a collective."""
    weight = next(model.parameters())
    return isinstance(model, fsdp.FSDPModule) or is_zero3(weight)


def is_zero3(weight: Tensor) -> bool:
    """Return whether ZeRO-3 shards a weight."""
    return hasattr(weight, "ds_id")


def whole(value: Any) -> Any:
    """Return the full tensor of a DTensor (a collective), or the value itself."""
    if hasattr(value, "full_tensor"):
        return value.full_tensor()
    return value


def build_whole() -> None:
    """Make transformers build complete models under ZeRO-3, instead of sharded models.

    Call this function after creating TrainingArguments or a Trainer, because both turn sharding on.
    """
    # Weights that transformers (5.23, `get_init_context`) creates in shards get other random numbers than under other
    # launchers, and one rank alone cannot build a model. DeepSpeed shards the complete model later.
    unset_hf_deepspeed_config()


def set_master_of_zero3(weight: Any, full: Tensor) -> None:
    """Set the fp32 master of a weight to this rank's part of the tensor `full`."""
    length = weight.ds_tensor.numel()
    padded_size = length * dist.get_world_size()
    padding = padded_size - full.numel()  # at the end of the last rank's part
    padded = nn.functional.pad(full.flatten(), (0, padding))
    start = length * dist.get_rank()
    own_part = padded.narrow(0, start, length)
    weight._z3_optimizer.set_local_hp_param(own_part, weight)


def fix_weight_decay(optimizer: Any, weight_decay: float) -> None:
    """Restore the weight decay of both parameter groups after a resume under ZeRO-3."""
    # A checkpoint in universal form gives all groups the decay of the first group (runtime/zero/stage3.py, 0.19.8).
    # DeepSpeed drops a group without weights. An OLMo model has only matrices.
    decays = (weight_decay, 0.0)
    for group, decay in zip(optimizer.param_groups, decays, strict=False):
        group["weight_decay"] = decay


def shard_by_fsdp(model: nn.Module, accelerator: Any) -> None:
    """Shard the weights with FSDP2. Call this if the launcher requests FSDP."""
    # accelerate's `fsdp2_prepare_model` (1.15) rounds all outputs, including the loss, to bf16. It sums gradients over
    # processes in bf16, and gathers tied embeddings when the head is called, but our loss never calls the head.
    # accelerate does not shard a sharded model again, and still handles optimizer, gradient norm and checkpoints.
    from torch.distributed.device_mesh import init_device_mesh

    device = accelerator.device.type
    mesh = init_device_mesh(device, (accelerator.num_processes,))
    precision = fsdp.MixedPrecisionPolicy()
    if accelerator.mixed_precision == "bf16":
        precision = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    base_model: Any = model.base_model
    block_lists = [part for part in base_model.children() if isinstance(part, nn.ModuleList)]
    blocks = block_lists[0]
    # By default the outermost unit is not resharded after a pass. Between steps its fp32 masters could not be read.
    for part in (*blocks, model):
        fsdp.fully_shard(part, mesh=mesh, mp_policy=precision, reshard_after_forward=True)
    if device == "cpu":  # gloo has no mean reduction
        for part in model.modules():
            if isinstance(part, fsdp.FSDPModule):
                part.set_force_sum_reduction_for_comms(True)


def dtypes_of_fsdp(wrapped: Any) -> dict[str, torch.dtype | None]:
    """Return dtypes of products and gradient sums (None: as the weights), or {}."""
    if not isinstance(wrapped, fsdp.FSDPModule):
        return {}
    policy = wrapped._get_fsdp_state()._mp_policy
    return {
        "matrix_products": policy.param_dtype,
        "gradient_sums": policy.reduce_dtype,
    }

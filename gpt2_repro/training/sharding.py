"""Weights that no process holds whole, ZeRO-3's and FSDP2's: built whole all the same, and told from those that are."""

from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers.integrations.deepspeed import unset_hf_deepspeed_config


def has_shards(model: nn.Module) -> bool:
    """Whether each process holds a part of every weight: then a pass is made by all processes or by none."""
    return isinstance(model, FSDPModule) or hasattr(next(model.parameters()), "ds_id")


def build_whole() -> None:
    """Have transformers build models whole from here on; DeepSpeed's engine cuts up what it is given.

    Told of ZeRO-3, transformers (5.23, `get_init_context`) builds each model in shards: from other random numbers than
    every other launcher draws, and on a single rank not at all. TrainingArguments tell it, and Trainer once more.
    """
    unset_hf_deepspeed_config()


def allow_fsdp_on_cpu() -> None:
    """Have accelerate shard on CPU processes as it does on GPUs; it would leave FSDP out without a word (1.15, state.py)."""
    PartialState()._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def shard_by_fsdp(model: nn.Module, accelerator: Any) -> None:
    """Cut the weights up by FSDP2, where the launcher asks for it: each block is fetched by itself, the rest with the model.

    Not by accelerate (1.15, `fsdp2_prepare_model`), which finds the model sharded and leaves it: it would round the loss to
    bf16 with all outputs, sum gradients over processes in bf16, and fetch tied embeddings behind the call of a head that
    the loss never calls. Optimizer, norm and checkpoints stay accelerate's.
    """
    if getattr(accelerator.state, "fsdp_plugin", None) is None:
        return
    bf16 = accelerator.mixed_precision == "bf16"
    options = {
        "mesh": init_device_mesh(accelerator.device.type, (accelerator.num_processes,)),
        "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bf16 else MixedPrecisionPolicy(),
    }
    blocks: Any = next(part for part in model.base_model.children() if isinstance(part, nn.ModuleList))
    # By default the outermost part stays whole behind a pass, and what reads weights between two steps finds no masters.
    for part in (*blocks, model):
        fully_shard(part, reshard_after_forward=True, **options)
    if accelerator.device.type == "cpu":  # gloo has no mean
        for part in model.modules():
            if isinstance(part, FSDPModule):
                part.set_force_sum_reduction_for_comms(True)


def whole(value: Any) -> Any:
    """A tensor that is spread over the processes, summed up or put together on each; anything else as it is."""
    return value.full_tensor() if isinstance(value, DTensor) else value

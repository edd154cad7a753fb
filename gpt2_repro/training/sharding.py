"""Weights that no process holds whole, ZeRO-3's: built whole all the same, and told from those that are."""

import torch
from transformers.integrations.deepspeed import unset_hf_deepspeed_config


def has_shards(model: torch.nn.Module) -> bool:
    """Whether each process holds a part of every weight: then a pass is made by all processes or by none."""
    return hasattr(next(model.parameters()), "ds_id")


def build_whole() -> None:
    """Have transformers build models whole from here on; DeepSpeed's engine cuts up what it is given.

    Told of ZeRO-3, transformers (5.23, `get_init_context`) builds each model in shards: from other random numbers than
    every other launcher draws, and on a single rank not at all. TrainingArguments tell it, and Trainer once more.
    """
    unset_hf_deepspeed_config()

"""Tiny GPT-2, Llama and Mixtral models with enlarged initial weights."""

import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from gpt2_repro.config import JsonObject
from gpt2_repro.model.arguments import ModelArguments
from gpt2_repro.model.configuration import build_config
from gpt2_repro.model.pretraining import make_pretraining


SEPARATOR, VOCABULARY, PADDED, LENGTH = 7, 90, 96, 16
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
SHAPE = {"vocab_size": PADDED, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SHAPE |= {"max_position_embeddings": LENGTH, "bos_token_id": SEPARATOR, "eos_token_id": SEPARATOR}
GROUPED = {"num_key_value_heads": 2, "intermediate_size": 24}
# No load-balancing loss: the stock loss would contain it, and ours does not. Grouped products have no float64.
EXPERTS = {"num_local_experts": 4, "router_aux_loss_coef": 0.0, "experts_implementation": "eager"}
CONFIGS = {
    "gpt2": GPT2Config(**SHAPE, **NO_DROPOUT),
    "llama": LlamaConfig(**SHAPE, **GROUPED),
    "mixtral": MixtralConfig(**SHAPE, **GROUPED, **EXPERTS),
}


def arguments(model_type: str = "gpt2", overrides: str = "", **further) -> ModelArguments:
    """Return the section `model:` of a small model."""
    shape = {"n_layer": 2, "n_head": 4, "n_embd": 32} | further
    return ModelArguments(model_type=model_type, config_overrides=JsonObject(overrides), **shape)


def configuration(
    model_type: str = "gpt2", overrides: str = "", *, sequence_length: int = 16, vocab_size: int = 90, **further
) -> PreTrainedConfig:
    """Return the configuration of a small model for training."""
    args = arguments(model_type, overrides, **further)
    return build_config(args, sequence_length=sequence_length, vocab_size=vocab_size)


def build(family: str, attention="causal_sdpa", *, dtype=torch.float32, documents=None) -> PreTrainedModel:
    """Return a tiny model with this project's forward pass for pre-training.

    The weights are reproducible. `family` is gpt2, llama or mixtral. If `documents` is given, tokens attend only to
    their own document.
    """
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[family], dtype=dtype, attn_implementation="causal_sdpa")
    model.config._attn_implementation = attention  # set directly, because flash-attn is not installed
    with torch.no_grad():
        for parameter in model.parameters():
            # Larger weights make errors visible.
            parameter.mul_(3)
    return make_pretraining(model, vocab_size=VOCABULARY, documents=documents)

"""Compute a model's number of parameters and training FLOPs per token."""

from typing import TYPE_CHECKING

from gpt2_repro.model.arguments import GPT2, ModelArguments
from gpt2_repro.model.size import ModelScale, flops_per_token, gpt2_scale


if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def scale_of(args: ModelArguments, *, sequence_length: int, vocab_size: int) -> ModelScale:
    """Return the parameter count and the FLOPs per token of a recipe's model.

    Raises UserError if the architecture does not accept the keys of --config_overrides.
    """
    if args.model_type == GPT2 and not args.config_overrides:
        shape = {"n_layer": args.n_layer, "n_embd": args.n_embd, "pad_to_multiple_of": args.pad_vocab_to_multiple_of}
        return gpt2_scale(**shape, sequence_length=sequence_length, vocab_size=vocab_size)
    import torch

    from gpt2_repro.model.configuration import build_config, stock_model

    config = build_config(args, sequence_length=sequence_length, vocab_size=vocab_size)
    with torch.device("meta"):
        return measure(stock_model(config, attention="eager"), sequence_length)


def experts_of(config: "PreTrainedConfig") -> tuple[int, int]:
    """Return the number of experts in each block, and of those that a token uses; (0, 0) for a dense model."""
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    experts = next((number for name in names if isinstance(number := getattr(config, name, None), int)), 0)
    return experts, getattr(config, "num_experts_per_tok", None) or 0


def measure(model: "PreTrainedModel", sequence_length: int) -> ModelScale:
    """Return the parameter count and FLOPs per token of a model, also on the meta device."""
    from torch import nn

    config, head = model.config, model.get_output_embeddings().weight
    tables = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    looked_up = sum(table.numel() for table in tables if table is not head)
    trained, idle = model.num_parameters(), 0
    experts, chosen = experts_of(config)
    if experts:  # weights of experts that a single token does not use
        stacked = [weight for weight in model.parameters() if weight.ndim == 3 and len(weight) == experts]
        idle = sum(weight.numel() for weight in stacked) * (experts - chosen) // experts
    padding = (config.vocab_size - config.true_vocab_size) * head.shape[1]
    parameters = trained - padding * (1 if model.get_input_embeddings().weight is head else 2)
    layers, heads = config.num_hidden_layers, config.num_attention_heads
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    used = trained - looked_up - idle
    flops = flops_per_token(parameters=used, n_layer=layers, n_embd=width, sequence_length=sequence_length)
    return ModelScale(parameters, parameters - idle, trained, flops, padded_vocab_size=config.vocab_size)

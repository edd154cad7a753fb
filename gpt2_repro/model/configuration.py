"""Build the transformers configuration and model of the recipe section `model:`."""

from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from gpt2_repro.errors import UserError, did_you_mean, in_a_line
from gpt2_repro.model.arguments import GPT2, SHAPE, ModelArguments, size_keys
from gpt2_repro.model.size import padded_size


# Keys that --config_overrides may not set, with the reason.
OWNED = {
    **{name: f"pass --{option}" for option, name in SHAPE.items()},
    "max_position_embeddings": "pass --sequence_length",
    **dict.fromkeys(("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id"), "the data's tokenizer defines it"),
    "use_cache": "training uses no cache",
    "sliding_window": "training attends to all earlier tokens of a row",
}
# Options to load weights of unknown authors: no pickles, no remote code.
SAFELY = {"dtype": torch.float32, "use_safetensors": True, "trust_remote_code": False}
# Exceptions of transformers for configurations that it cannot build or run.
FAILURES = (
    *(StrictDataclassError, TypeError, ValueError, AttributeError, LookupError),
    *(AssertionError, ImportError, ArithmeticError, RuntimeError),
)


def build_config(
    args: ModelArguments, *, sequence_length: int, vocab_size: int, tokenizer: PreTrainedTokenizerBase | None = None
) -> PreTrainedConfig:
    """Return the training configuration with a padded vocabulary, or raise UserError."""
    default = AutoConfig.for_model(args.model_type)
    values: dict[str, Any] = {name: getattr(args, option) for option, name in SHAPE.items()}
    values |= {"vocab_size": padded_size(vocab_size, args.pad_vocab_to_multiple_of), "use_cache": False}
    values |= {"max_position_embeddings": sequence_length, "pad_token_id": None}
    if tokenizer is not None:
        values |= {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    dropouts = [name for name in own_keys(default) if name.endswith(("pdrop", "_dropout")) and "summary" not in name]
    values |= dict.fromkeys(dropouts, args.dropout)
    if args.model_type == GPT2:
        # The same function as gelu_new, with one kernel instead of eight (transformers activations.py).
        values["activation_function"] = "gelu_pytorch_tanh"
    values |= size_keys(args, sequence_length=sequence_length)
    config = _with_overrides(default, values, args.config_overrides.values)
    config.true_vocab_size = vocab_size
    return config


def _with_overrides(default: PreTrainedConfig, values: dict[str, Any], overrides: dict[str, Any]) -> PreTrainedConfig:
    """Return `default` changed by `values` and `overrides`, or raise UserError."""
    kind, keys = type(default), own_keys(default)
    owned = OWNED | {kind.attribute_map.get(name, name): reason for name, reason in OWNED.items()}
    for key in overrides:
        if key in owned:
            raise UserError(f"--config_overrides cannot set {key}: {owned[key]}.")
        if key not in keys:
            raise UserError(
                f"{kind.model_type} has no key {key!r} for --config_overrides. {did_you_mean(key, keys - owned.keys())}"
            )
    try:
        config = kind(**{kind.attribute_map.get(name, name): value for name, value in values.items()} | overrides)
    except FAILURES as error:
        raise UserError(f"transformers rejects this {kind.model_type} configuration: {in_a_line(error)}") from None
    heads, groups = config.num_attention_heads, getattr(config, "num_key_value_heads", None)
    if groups and heads % groups:
        raise UserError(f"num_key_value_heads {groups} is not a divisor of --n_head {heads}.")
    if getattr(config, "num_experts_per_tok", 0) > getattr(config, "num_local_experts", 0):
        raise UserError("num_experts_per_tok must be at most num_local_experts.")
    return config


def stock_model(config: PreTrainedConfig, *, attention: str) -> PreTrainedModel:
    """Return transformers' own model with random fp32 weights, or raise UserError."""
    try:
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention)
    except FAILURES as error:
        raise UserError(f"transformers cannot build this {config.model_type} model: {in_a_line(error)}") from None


def own_keys(config: PreTrainedConfig) -> set[str]:
    """Return the keys that the class of `config` declares, and `tie_word_embeddings`."""
    return {*type(config).__annotations__, "tie_word_embeddings"}

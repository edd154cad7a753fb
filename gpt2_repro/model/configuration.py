"""From a recipe's section to the configuration of a model, GPT-2 or any other causal one of transformers."""

import json
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PreTrainedConfig, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from gpt2_repro.compute import padded_size
from gpt2_repro.errors import UserError, did_you_mean
from gpt2_repro.model.arguments import GPT2, SHAPE, ModelArguments


OWNED = {
    **{name: f"--{option}" for option, name in SHAPE.items()},
    "max_position_embeddings": "--sequence_length",
    "vocab_size": "the tokenizer of the data",
    "bos_token_id": "the tokenizer of the data",
    "eos_token_id": "the tokenizer of the data",
    "pad_token_id": "the tokenizer of the data",
    "use_cache": "training, which has no cache",
}
# transformers raises these for keys and values of a configuration.
REFUSALS = (StrictDataclassError, TypeError, ValueError, KeyError, AttributeError, NotImplementedError)
# And these while it builds a model and computes with it.
FAILURES = (*REFUSALS, LookupError, AssertionError, ImportError, ArithmeticError, RuntimeError)


def build_config(
    args: ModelArguments, *, sequence_length: int, vocab_size: int, tokenizer: PreTrainedTokenizerBase | None = None
) -> PreTrainedConfig:
    """The training configuration: padded vocabulary, no cache. `tokenizer` gives the special ids.

    Raises UserError for an architecture that transformers does not have and overrides that it does not take.
    """
    default = _default_config(args.model_type)
    values: dict[str, Any] = {name: getattr(args, option) for option, name in SHAPE.items()}
    values |= {"vocab_size": padded_size(vocab_size, args.pad_vocab_to_multiple_of), "use_cache": False}
    values |= {"max_position_embeddings": sequence_length, "pad_token_id": None}
    if tokenizer is not None:
        values |= {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    dropouts = [name for name in own_keys(default) if name.endswith(("pdrop", "_dropout")) and "summary" not in name]
    if args.dropout and not dropouts:
        raise UserError(f"{args.model_type} has no dropout: leave out --dropout {args.dropout}")
    values |= dict.fromkeys(dropouts, args.dropout)
    if args.model_type == GPT2:
        # gelu_new by another name: one kernel instead of eight (transformers activations.py).
        values["activation_function"] = "gelu_pytorch_tanh"
    return _with_overrides(default, values, json.loads(args.config_overrides or "{}"), vocab_size)


def _default_config(model_type: str) -> PreTrainedConfig:
    if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise UserError(
            f"transformers has no causal model {model_type!r}: {did_you_mean(model_type, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)}"
        )
    try:
        default = AutoConfig.for_model(model_type)
    except REFUSALS as error:
        raise UserError(f"transformers has no default for a {model_type}: {in_a_line(error)}") from None
    if default.is_encoder_decoder:
        raise UserError(
            f"a {model_type} is half of an encoder and a decoder, whose other half is never trained: name another"
        )
    if (text := default.get_text_config()) is not default:
        known = text.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        mend = f"type --model_type {text.model_type}" if known else "name another"
        raise UserError(f"a {model_type} has its language model beside other parts: {mend}")
    return default


def _with_overrides(
    default: PreTrainedConfig, values: dict[str, Any], overrides: dict[str, Any], vocab_size: int
) -> PreTrainedConfig:
    """A configuration of the class of `default`. `values` go by transformers' common names, or by the class's own."""
    kind, keys = type(default), own_keys(default)
    owners = OWNED | {kind.attribute_map.get(name, name): owner for name, owner in OWNED.items()}
    for key in overrides:
        if owner := owners.get(key):
            raise UserError(f"config_overrides cannot set {key}, which {owner} decides")
        if key not in keys:
            raise UserError(
                f"a {kind.model_type} has no {key!r} for config_overrides: {did_you_mean(key, keys - owners.keys())}"
            )
    try:
        config = kind(**{kind.attribute_map.get(name, name): value for name, value in values.items()} | overrides)
    except REFUSALS as error:
        raise UserError(f"transformers refuses this {kind.model_type}: {in_a_line(error)}") from None
    heads, groups = config.num_attention_heads, getattr(config, "num_key_value_heads", None)
    if groups and heads % groups:
        raise UserError(
            f"{heads} heads do not share {groups} key and value heads: set num_key_value_heads in --config_overrides to a "
            f"divisor of --n_head {heads}"
        )
    config.true_vocab_size = vocab_size
    return config


def in_a_line(error: Exception) -> str:
    """What it says, or its name where it says nothing."""
    return " ".join(str(error).split())[:300] or type(error).__name__


def own_keys(config: PreTrainedConfig) -> set[str]:
    """What an architecture calls its own, and whether embeddings are tied, which all know."""
    return {*type(config).__annotations__, "tie_word_embeddings"}

"""Build the transformers configuration and model of the recipe section `model:`."""

import contextlib
import re
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.initialization import no_init_weights

from gpt2_repro.errors import UserError, did_you_mean, in_a_line
from gpt2_repro.model.arguments import GPT2, ModelArguments
from gpt2_repro.model.size import ModelScale, experts_of, flops_per_token, gpt2_scale, padded_size


Kind = type[PreTrainedConfig]
Keys = dict[str, Any]

_OF_TOKENIZER = "the data's tokenizer defines it"
# Keys of a configuration that --config_overrides may not set, with the reason.
OWNED_KEYS = {
    "num_hidden_layers": "pass --n_layer",
    "num_attention_heads": "pass --n_head",
    "hidden_size": "pass --n_embd",
    "max_position_embeddings": "pass --sequence_length",
    "vocab_size": _OF_TOKENIZER,
    "bos_token_id": _OF_TOKENIZER,
    "eos_token_id": _OF_TOKENIZER,
    "pad_token_id": _OF_TOKENIZER,
    "use_cache": "training uses no cache",
}
# Names of the width of the MLP or of the experts. The first one that an architecture has is used.
WIDTHS_OF_MLP = ("moe_intermediate_size", "intermediate_size", "ffn_dim", "n_inner")
# Options to load weights of unknown authors: no pickles, no remote code.
SAFELY = {"dtype": torch.float32, "use_safetensors": True, "trust_remote_code": False}
# Exceptions of transformers for configurations that it cannot build or run.
FAILURES = (
    *(StrictDataclassError, TypeError, ValueError, AttributeError, LookupError),
    *(AssertionError, ImportError, ArithmeticError, RuntimeError),
)


def size_keys(args: ModelArguments, *, sequence_length: int) -> Keys:
    """Return the keys that make another architecture as large as GPT-2.

    The GPT-2 has the same layers, heads, width, row length and vocabulary. The width of the MLP, or of the experts, is
    derived from the FLOPs per token. Keys of --config_overrides replace these keys.
    """
    if args.model_type == GPT2:
        return {}
    declared = own_keys(CONFIG_MAPPING[args.model_type])
    keys: Keys = {}
    if "num_key_value_heads" in declared:
        keys["num_key_value_heads"] = args.n_head
    if "head_dim" in declared:
        keys["head_dim"] = args.n_embd // args.n_head
    if "tie_word_embeddings" in declared:
        keys["tie_word_embeddings"] = True
    widths = [key for key in WIDTHS_OF_MLP if key in declared]
    if not widths or widths[0] in args.config_overrides.values:
        return keys
    width = widths[0]

    # The FLOPs grow linearly with the width.
    vocab_size = 128
    narrow = build_config(args, sequence_length=sequence_length, vocab_size=vocab_size, keys=keys | {width: 64})
    wide = build_config(args, sequence_length=sequence_length, vocab_size=vocab_size, keys=keys | {width: 128})
    of_narrow = measure_config(narrow).flops_per_token
    of_wide = measure_config(wide).flops_per_token
    if of_narrow == of_wide:
        return keys  # the architecture has no such MLP
    gpt2 = gpt2_scale(
        n_layer=args.n_layer,
        n_embd=args.n_embd,
        sequence_length=sequence_length,
        vocab_size=vocab_size,
        pad_to_multiple_of=narrow.vocab_size,
    )
    exact = 64 + 64 * (gpt2.flops_per_token - of_narrow) / (of_wide - of_narrow)
    if exact < 8:
        fix = f"Pass {width} and its other sizes in --config_overrides."
        raise UserError(f"--model_type {args.model_type} cannot have the FLOPs of a GPT-2 with this shape. {fix}")
    keys[width] = _round_width(exact)
    return keys


def _round_width(exact: float) -> int:
    """Return a width near `exact` that is a multiple of the largest power of two within 0.5 %, and at least of 8."""
    # A power of two suits matrix products. Those of experts need strides of 16 bytes (torch 2.13).
    for power in range(10, 2, -1):
        multiple = 1 << power
        rounded = round(exact / multiple) * multiple
        if abs(rounded / exact - 1) < 0.005:
            return rounded
    return max(1, round(exact / 8)) * 8


def build_config(
    args: ModelArguments,
    *,
    sequence_length: int,
    vocab_size: int,
    tokenizer: PreTrainedTokenizerBase | None = None,
    keys: Keys | None = None,
) -> PreTrainedConfig:
    """Return the training configuration with a padded vocabulary, or raise UserError.

    Args:
        keys: further keys of the configuration. None: those of `size_keys`.
    """
    if keys is None:
        keys = size_keys(args, sequence_length=sequence_length)
    kind = CONFIG_MAPPING[args.model_type]
    declared = own_keys(kind)
    values: Keys = {
        "num_hidden_layers": args.n_layer,
        "num_attention_heads": args.n_head,
        "hidden_size": args.n_embd,
        "max_position_embeddings": sequence_length,
        "vocab_size": padded_size(vocab_size, args.pad_vocab_to_multiple_of),
        "bos_token_id": getattr(tokenizer, "bos_token_id", None),
        "eos_token_id": getattr(tokenizer, "eos_token_id", None),
        "pad_token_id": None,
        "use_cache": False,
    }
    for key in declared:
        if key.endswith(("pdrop", "dropout")) and "summary" not in key:
            values[key] = args.dropout
    if "initializer_range" in declared:
        values["initializer_range"] = 0.02  # as in GPT-2, in every architecture
    if args.model_type == GPT2:
        # The same function as gelu_new, with one kernel instead of eight (transformers activations.py).
        values["activation_function"] = "gelu_pytorch_tanh"
    values |= keys
    overrides = args.config_overrides.values
    _check_overrides(kind, overrides, length=sequence_length)
    config = _build(kind, values | _without_windows(kind, values, overrides) | overrides)
    groups = getattr(config, "num_key_value_heads", None)
    if groups and config.num_attention_heads % groups:
        raise UserError(f"num_key_value_heads {groups} is not a divisor of --n_head {config.num_attention_heads}.")
    experts, chosen = experts_of(config)
    if chosen > experts:
        raise UserError("num_experts_per_tok must be at most the number of experts.")
    config.true_vocab_size = vocab_size
    return config


def _check_overrides(kind: Kind, overrides: Keys, *, length: int) -> None:
    """Raise UserError for keys of --config_overrides that are unknown, set elsewhere, or a window within the row."""
    keys = own_keys(kind)
    # An architecture can have its own name of a key, as GPT-2 has n_embd.
    owned = OWNED_KEYS | {kind.attribute_map.get(name, name): reason for name, reason in OWNED_KEYS.items()}
    for key, value in overrides.items():
        if key in owned:
            raise UserError(f"--config_overrides cannot set {key}: {owned[key]}.")
        if key not in keys:
            valid = did_you_mean(key, sorted(keys - owned.keys()))
            raise UserError(f"{kind.model_type} has no key {key!r} for --config_overrides. {valid}")
        if key.endswith(("window", "window_size")) and type(value) is int and 0 < value < length:
            raise UserError(f"Remove {key} from --config_overrides, or pass at least {length}. Rows are not windowed.")


def _without_windows(kind: Kind, values: Keys, overrides: Keys) -> Keys:
    """Return keys for attention to the whole row, as in GPT-2, unless `overrides` choose windows or their layers."""
    keys = own_keys(kind)
    if "sliding_window" not in keys or any("window" in key for key in overrides):
        return {}
    if "layer_types" not in keys:
        return {"sliding_window": None}
    default = _build(kind, values).layer_types
    types = _build(kind, values | overrides).layer_types
    if types != default or "sliding_attention" not in types:
        return {}
    full = ["full_attention" if layer == "sliding_attention" else layer for layer in types]
    return {"sliding_window": values["max_position_embeddings"], "layer_types": full}


def _build(kind: Kind, values: Keys) -> PreTrainedConfig:
    """Return the configuration with `values`, or raise UserError."""
    try:
        config = kind(**{kind.attribute_map.get(name, name): value for name, value in values.items()})
    except FAILURES as error:
        raise UserError(f"transformers rejects this {kind.model_type} configuration: {reason_of(error)}.") from None
    if kind.sub_configs or getattr(config, "is_heterogeneous", False):
        raise UserError(f"--model_type {kind.model_type} is not supported: its parts or layers have different shapes.")
    return config


def stock_model(config: PreTrainedConfig, *, attention: str, is_random: bool = True) -> PreTrainedModel:
    """Return transformers' own model in fp32, or raise UserError.

    Args:
        is_random: draw the weights, which takes 2 s for 124M. Otherwise they are NaN until they are loaded.
    """
    try:
        with contextlib.nullcontext() if is_random else no_init_weights():
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention)
    except FAILURES as error:
        raise UserError(f"--model_type {config.model_type} is not supported: {reason_of(error)}.") from None
    if not is_random:
        model.tie_weights()
        for weight in model.parameters():
            weight.data.fill_(torch.nan)
    return model


def measure(model: PreTrainedModel, sequence_length: int) -> ModelScale:
    """Return the parameter count and FLOPs per token of a model, also on the meta device."""
    config = model.config
    head = model.get_output_embeddings().weight
    experts, chosen = experts_of(config)
    looked_up = 0  # weights of embeddings that are not multiplied
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding) and module.weight is not head:
            looked_up += module.weight.numel()
    of_experts = 0
    for weight in model.parameters():
        if weight.ndim == 3 and len(weight) == experts:
            of_experts += weight.numel()
    idle = of_experts * (experts - chosen) // max(1, experts)  # weights of experts that a single token does not use

    trained = model.num_parameters()
    padding = (config.vocab_size - config.true_vocab_size) * head.shape[1]
    is_tied = model.get_input_embeddings().weight is head
    parameters = trained - (padding if is_tied else 2 * padding)
    heads = config.num_attention_heads
    head_width = getattr(config, "head_dim", None) or config.hidden_size // heads
    flops = flops_per_token(
        parameters=trained - looked_up - idle,
        n_layer=config.num_hidden_layers,
        n_embd=heads * head_width,
        sequence_length=sequence_length,
    )
    return ModelScale(parameters, parameters - idle, trained, flops, padded_vocab_size=config.vocab_size)


def measure_config(config: PreTrainedConfig) -> ModelScale:
    """Return the parameter count and FLOPs per token of the model with a configuration, for its longest rows."""
    with torch.device("meta"):
        return measure(stock_model(config, attention="eager"), config.max_position_embeddings)


def reason_of(error: Exception) -> str:
    """Return why transformers cannot build or run a model, without the texts of Python's own exceptions."""
    if isinstance(error, (TypeError, AttributeError, LookupError)):
        return f"the code of transformers fails with this configuration ({type(error).__name__})"
    return re.sub("^.*Error: ", "", in_a_line(error)).partition(" Please ")[0].rstrip(".")


def own_keys(kind: Kind) -> set[str]:
    """Return the keys that a class of configurations declares, and `tie_word_embeddings`."""
    return {*kind.__annotations__, "tie_word_embeddings"}

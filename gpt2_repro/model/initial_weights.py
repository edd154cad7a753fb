"""Initialize a model for training with the shape and the weights of a checkpoint."""

import dataclasses
import json
from collections.abc import Collection
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from gpt2_repro.config import JsonObject
from gpt2_repro.errors import UserError
from gpt2_repro.model.arguments import SHAPE, ModelArguments
from gpt2_repro.model.checkpoint import resolve_checkpoint
from gpt2_repro.model.configuration import FAILURES, own_keys, size_keys
from gpt2_repro.model.load import load_config, load_model, load_tokenizer
from gpt2_repro.model.pretraining import plain_config
from gpt2_repro.model.size import padded_size
from gpt2_repro.tokenization import is_same


# Keys in which a checkpoint may differ from the model that it initializes. They do not change the model's outputs in
# evaluation mode.
FREE_KEYS = {
    *("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id", "n_positions", "max_position_embeddings"),
    *("use_cache", "embd_pdrop", "resid_pdrop", "attn_pdrop", "attention_dropout", "initializer_range"),
    *(
        "reorder_and_upcast_attn",
        "pretraining_tp",
        "output_router_logits",
        "router_aux_loss_coef",
        "router_jitter_noise",
    ),
}


def follow_checkpoint(model: ModelArguments, stated: Collection[str]) -> ModelArguments:
    """Return the section `model:` with the shape of `init_from`.

    The shape includes the keys of `configuration.size_keys`. Fields that the user set (`stated`) are not changed.
    """
    config = _read_config(model.init_from)
    if config is None or config.model_type != model.model_type:
        return model  # the error is raised later, when the weights are loaded
    for name, key in SHAPE.items():
        is_chosen = name in stated and getattr(model, name)
        if not is_chosen:
            model = dataclasses.replace(model, **{name: getattr(config, key)})
    keys = {key: getattr(config, key) for key in size_keys(model, sequence_length=1)}
    overrides = JsonObject(keys | model.config_overrides.values)
    return dataclasses.replace(model, config_overrides=overrides)


def _read_config(name: str) -> PreTrainedConfig | None:
    """Return the configuration of a folder or Hub id, or None if it cannot be read."""
    try:
        source = resolve_checkpoint(name).source
    except UserError:  # it does not exist
        return None
    try:
        return load_config(source)
    except (UserError, OSError, *FAILURES):  # transformers raises all of them for a wrong config.json
        return None


def start_from(name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> None:
    """Copy the weights of a folder or Hub id into `model`.

    Raises UserError if the checkpoint cannot be loaded, or does not match `model` or `tokenizer`.
    """
    checkpoint = resolve_checkpoint(name)
    checkpoint.log_weights()
    source = load_model(checkpoint.source)
    if tokenizer is not None:
        _check_tokenizer(checkpoint.source, tokenizer, name=name)
    _check_config(source.config, model.config, name=name)
    source.resize_token_embeddings(model.config.true_vocab_size)  # without padding
    weights = dict(source.named_parameters())
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter[: len(weights[key])] = weights[key]


def _check_config(source: PreTrainedConfig, target: PreTrainedConfig, *, name: str) -> None:
    """Raise UserError if architectures, vocabularies, shapes or other keys differ."""
    if source.model_type != target.model_type:
        problem = f"{name} is a {source.model_type}, but this recipe trains a {target.model_type}."
        raise UserError(f"{problem} Pass --init_from and --model_type of the same architecture.")
    padded = [padded_size(target.true_vocab_size, 2**power) for power in range(3, 10)]
    if source.vocab_size not in (target.true_vocab_size, *padded):
        problem = f"{name} has {source.vocab_size:,} token ids, but the data has {target.true_vocab_size:,}."
        raise UserError(f"{problem} Pass data that was prepared with the tokenizer of {name}.")
    options = dict(SHAPE)
    if hasattr(target, "n_positions"):
        options["sequence_length"] = "n_positions"
    words: list[str] = []
    for option, key in options.items():
        if getattr(source, key) != getattr(target, key):
            words.append(f"--{option} {getattr(source, key)}")
    if words:
        fix = f"Pass {' '.join(words)}, and data of this length."
        raise UserError(f"{name} has a different shape than this recipe's model. {fix}")
    source = plain_config(source)
    plain = plain_config(target)
    shaped = {type(target).attribute_map.get(key, key) for key in SHAPE.values()}
    different: dict[str, Any] = {}
    for key in sorted(own_keys(type(target)) - shaped - FREE_KEYS):
        if not key.startswith("summary_") and getattr(source, key) != getattr(plain, key):
            different[key] = getattr(source, key)
    if different:
        raise UserError(f"{name} needs further keys in --config_overrides: {json.dumps(different)}.")


def _check_tokenizer(checkpoint: str, tokenizer: PreTrainedTokenizerBase, *, name: str) -> None:
    try:
        source = load_tokenizer(checkpoint)
    except UserError:
        return  # the checkpoint has no tokenizer
    # For a checkpoint without a tokenizer, transformers may create one with special tokens only.
    if source.get_vocab().keys() - set(source.all_special_tokens) and not is_same(source, tokenizer):
        raise UserError(f"{name} has a different tokenizer than the data. Prepare the data with --tokenizer {name}.")

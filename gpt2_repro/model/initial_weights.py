"""The weights of a plain checkpoint as the start of a training: only where they mean the same there."""

import json

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from gpt2_repro.errors import UserError
from gpt2_repro.model.arguments import SHAPE
from gpt2_repro.model.configuration import own_keys
from gpt2_repro.model.export import load_model, load_tokenizer, resolve_checkpoint
from gpt2_repro.model.pretraining import plain_config


# Of what an architecture calls its own, what a checkpoint may have otherwise: it does not decide the function.
FREE = (
    "vocab_size",
    "use_cache",
    "initializer_range",
    "reorder_and_upcast_attn",
    "pretraining_tp",
    "output_router_logits",
)
FREE_ENDS = ("_token_id", "pdrop", "_dropout", "_positions", "_position_embeddings", "_noise", "_coef")


def start_from(name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> None:
    """Put the weights of the folder or Hub id `name` into a model that is to be trained.

    Raises UserError where they cannot be loaded, or where their shape, function, vocabulary, or a tokenizer that lies
    beside them is not the model's and that of the data.
    """
    checkpoint = resolve_checkpoint(name)
    _copy_weights(load_model(checkpoint), model, name=name)
    if tokenizer is not None:
        _check_tokenizer(checkpoint, tokenizer, name=name)


def _copy_weights(source: PreTrainedModel, model: PreTrainedModel, *, name: str) -> None:
    """Copy a plain checkpoint into a model whose vocabulary may be padded; the padding keeps what it has.

    Raises UserError where the two differ in shape, with the options that make them agree.
    """
    theirs, ours = source.config, model.config
    if theirs.model_type != ours.model_type:
        raise UserError(
            f"{name} is a {theirs.model_type} and this recipe trains a {ours.model_type}: name one of those, or type "
            f"--model_type {theirs.model_type}"
        )
    options = SHAPE | ({"sequence_length": "n_positions"} if hasattr(ours, "n_positions") else {})
    asked = {option: getattr(ours, key) for option, key in options.items()}
    found = {option: getattr(theirs, key) for option, key in options.items()}
    if found != asked:
        mend = " ".join(f"--{option} {value}" for option, value in found.items() if value != asked[option])
        raise UserError(f"{name} has another shape than this recipe: type {mend}")
    plain = plain_config(ours)
    shaped = {type(ours).attribute_map.get(key, key) for key in SHAPE.values()}
    compared = [key for key in sorted(own_keys(ours) - shaped - {*FREE}) if _decides(key)]
    default = type(ours)()
    # All that makes it what it is: overrides that are typed replace those of the recipe.
    whole = {key: value for key in compared if (value := getattr(theirs, key)) != getattr(default, key)}
    for key in compared:
        one, other = getattr(theirs, key), getattr(plain, key)
        if one != other:
            raise UserError(
                f"{name} computes another function than this recipe's {ours.model_type}: {key} {one}, not {other}; type "
                f"--config_overrides '{json.dumps(whole)}', or name another checkpoint"
            )
    if theirs.vocab_size != ours.true_vocab_size:
        raise UserError(
            f"{name} knows {theirs.vocab_size:,} ids and the prepared data has {ours.true_vocab_size:,}: prepare the "
            "data with that checkpoint's tokenizer"
        )
    weights = dict(source.named_parameters())
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter[: len(weights[key])] = weights[key]


def _decides(key: str) -> bool:
    return not key.startswith("summary_") and not key.endswith(FREE_ENDS)


def _check_tokenizer(checkpoint: str, tokenizer: PreTrainedTokenizerBase, *, name: str) -> None:
    try:
        theirs = load_tokenizer(checkpoint).get_vocab()
    except UserError:
        return  # weights alone: there is nothing to compare
    ours = tokenizer.get_vocab()
    # For weights alone transformers may also make up an almost empty tokenizer.
    if theirs != ours and len(theirs) == len(ours):
        raise UserError(
            f"{name} gives its ids other meanings than the prepared data does: prepare the data with --tokenizer {name}"
        )

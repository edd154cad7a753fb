"""The weights of a plain checkpoint as the start of a training: only where they mean the same there."""

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from gpt2_repro.errors import UserError
from gpt2_repro.model.export import load_model, load_tokenizer, resolve_checkpoint
from gpt2_repro.model.pretraining import plain_config


# What decides the function that a GPT-2 of a given shape computes.
SAME_FUNCTION = (
    "activation_function",
    "layer_norm_epsilon",
    "n_inner",
    "scale_attn_weights",
    "scale_attn_by_inverse_layer_idx",
    "tie_word_embeddings",
)


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
            f"{name} is a {theirs.model_type} and this recipe trains a {ours.model_type}: name one of those"
        )
    plain = plain_config(ours)
    for key in SAME_FUNCTION:
        if getattr(theirs, key) != getattr(plain, key):
            raise UserError(
                f"{name} computes another function than this recipe's GPT-2: {key} {getattr(theirs, key)}, not "
                f"{getattr(plain, key)}; name a checkpoint like openai-community/gpt2"
            )
    asked = {key: getattr(ours, key, None) for key in ("n_layer", "n_head", "n_embd", "n_positions")}
    found = {key: getattr(theirs, key, None) for key in asked}
    if found != asked:
        mend = " ".join(
            f"--{'sequence_length' if key == 'n_positions' else key} {value}"
            for key, value in found.items()
            if value != asked[key]
        )
        raise UserError(f"{name} has another shape than this recipe: type {mend}")
    if theirs.vocab_size != ours.true_vocab_size:
        raise UserError(
            f"{name} knows {theirs.vocab_size:,} ids and the prepared data has {ours.true_vocab_size:,}: prepare the "
            "data with that checkpoint's tokenizer"
        )
    weights = dict(source.named_parameters())
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter[: len(weights[key])] = weights[key]


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

"""The stock model of an architecture, and whether pre-training computes what it does."""

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from gpt2_repro.errors import UserError


# transformers raises these for what a configuration says.
REFUSALS = (ValueError, TypeError, KeyError, AttributeError, AssertionError, ImportError)


def stock_model(config: PreTrainedConfig, *, attention: str) -> PreTrainedModel:
    """The model with fp32 weights. Raises UserError for a configuration of which there is none."""
    try:
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention)
    except REFUSALS as error:
        raise UserError(f"transformers builds no such {config.model_type}: {_line(error)}") from None


@torch.no_grad()
def require_stock_loss(model: PreTrainedModel, *, masked: bool, tolerance: float = 1e-3) -> None:
    """Raise UserError where hidden states times the head, or causal attention where the attention or a mask of documents
    makes it so, are not what the architecture computes: by the losses of one row, with a head that is louder than a fresh
    one, so that what is done to large logits shows.

    Of a mixture of experts rounding may send a token elsewhere: one in a hundred losses may differ.
    """
    name, asked = model.config.model_type, model.config._attn_implementation
    head = model.get_output_embeddings()
    if getattr(head, "bias", None) is not None:
        raise UserError(f"the head of a {name} has a bias, which the loss of pre-training leaves out: name another")
    fresh, training = head.weight.clone(), model.training
    ids = torch.arange(model.config.max_position_embeddings + 1)[None] * 7919 % model.config.true_vocab_size
    try:
        model.eval()
        head.weight.mul_(1 / fresh.std())
        model.set_attn_implementation("eager")
        expected = _losses(model(input_ids=ids[:, :-1], use_cache=False).logits, ids)
        _require_same(
            _own_losses(model, ids), expected, tolerance, f"a {name} computes more than hidden states times its head"
        )
        if asked == "causal_sdpa" or masked:
            model.set_attn_implementation("causal_sdpa")
            own = _own_losses(model, ids)
            mend = "attends otherwise than to all tokens before: type --attn_implementation eager"
            mend += ", without --document_mask" if masked else ""
            _require_same(own, expected, tolerance, f"a {name} of this configuration {mend}")
    except (*REFUSALS, RuntimeError) as error:
        raise UserError(f"a {name} of this configuration cannot be trained on tokens alone: {_line(error)}") from None
    finally:
        head.weight.copy_(fresh)
        model.set_attn_implementation(asked)
        model.train(training)


def _own_losses(model: PreTrainedModel, ids: Tensor) -> Tensor:
    hidden = model.base_model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
    return _losses(hidden @ model.get_output_embeddings().weight.T, ids)


def _losses(logits: Tensor, ids: Tensor) -> Tensor:
    return cross_entropy(logits[0].float(), ids[0, 1:], reduction="none")


def _require_same(own: Tensor, expected: Tensor, tolerance: float, complaint: str) -> None:
    other = (own - expected).abs() > tolerance * expected.abs().mean()
    if other.float().mean() > 0.01:
        raise UserError(f"{complaint}, so its loss here would not be its own")


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__

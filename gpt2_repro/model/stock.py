"""The stock model of an architecture, and whether pre-training computes what it does."""

import logging

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from gpt2_repro.errors import UserError
from gpt2_repro.model.configuration import FAILURES, in_a_line
from gpt2_repro.model.documents import Documents
from gpt2_repro.model.experts import balance_loss


logger = logging.getLogger(__name__)


def stock_model(config: PreTrainedConfig, *, attention: str) -> PreTrainedModel:
    """The model with fp32 weights. Raises UserError for a configuration of which there is none."""
    try:
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention)
    except FAILURES as error:
        line = in_a_line(error)
        if attention != "eager" and ("attention implementation" in line or attention in line):
            raise UserError(f"a {config.model_type} has no {attention}: type --attn_implementation eager") from None
        raise UserError(f"transformers builds no such {config.model_type}: {line}") from None


@torch.no_grad()
def require_stock_loss(model: PreTrainedModel, *, documents: Documents | None, tolerance: float = 1e-3) -> None:
    """Raise UserError where hidden states times the head, or causal attention where the attention or a mask of documents
    makes it so, are not what the architecture computes: by the losses of one row, with a head that is louder than a fresh
    one, so that what is done to large logits shows. And where tokens see later ones, or other `documents`.

    Of a mixture of experts rounding may send a token elsewhere: one in a hundred losses may differ.
    """
    name, asked = model.config.model_type, model.config._attn_implementation
    head = model.get_output_embeddings()
    if getattr(head, "bias", None) is not None:
        raise UserError(f"the head of a {name} has a bias, which the loss of pre-training leaves out: name another")
    fresh, training = head.weight.clone(), model.training
    vocab_size, length = model.config.true_vocab_size, model.config.max_position_embeddings
    logger.info("comparing with the stock %s, on one row of %s tokens", name, f"{length:,}")
    ids, middle = torch.arange(length + 1)[None] * 7919 % vocab_size, length // 2
    if documents:
        ids[ids == documents.separator] = (documents.separator + 1) % vocab_size
    try:
        model.eval()
        head.weight.mul_(1 / fresh.std())
        model.set_attn_implementation("eager")
        expected = _losses(model(input_ids=ids[:, :-1], use_cache=False).logits, ids)
        own = _own_losses(model, _otherwise(ids, slice(middle + 1, None), vocab_size), None)
        more = f"a {name} computes more than hidden states times its head, or sees tokens that come later"
        _require_same(own[:middle], expected[:middle], tolerance, more)
        if asked == "causal_sdpa" or documents:
            model.set_attn_implementation("causal_sdpa")
            mend = "attends otherwise than to all tokens before: type --attn_implementation eager"
            mend += ", without --document_mask" if documents else ""
            own = _own_losses(model, ids, documents)
            _require_same(own, expected, tolerance, f"a {name} of this configuration {mend}")
        if documents:
            ids[:, middle] = documents.separator
            others = _otherwise(ids, slice(0, middle), vocab_size)
            own, expected = (_own_losses(model, row, documents)[middle + 1 :] for row in (others, ids))
            beside = f"a {name} carries more than attention from one document to the next: leave out --document_mask"
            # A fresh state of a recurrence is quiet.
            _require_same(own, expected, tolerance / 100, beside)
        _require_routers(model, ids[:, :-1])
    except FAILURES as error:
        raise UserError(
            f"a {name} of this configuration cannot be trained on tokens alone: {in_a_line(error)}"
        ) from None
    finally:
        head.weight.copy_(fresh)
        model.set_attn_implementation(asked)
        model.train(training)


def _require_routers(model: PreTrainedModel, ids: Tensor) -> None:
    """Raise UserError where the loss that balances experts would find none at work."""
    if balance_loss(model) is None:
        return
    outputs = model.base_model(input_ids=ids, use_cache=False, output_router_logits=True)
    if not getattr(outputs, "router_logits", None):
        raise UserError(
            f"a {model.config.model_type} of this configuration has no routers to balance: set router_aux_loss_coef to 0.0 in "
            "--config_overrides"
        )


def _otherwise(ids: Tensor, part: slice, vocab_size: int) -> Tensor:
    """The same row with other ids in a part of it."""
    other = ids.clone()
    other[:, part] = (ids[:, part] + vocab_size // 2) % vocab_size
    return other


def _own_losses(model: PreTrainedModel, ids: Tensor, documents: Documents | None) -> Tensor:
    inside = documents.attention(model, ids[:, :-1]) if documents else {}
    hidden = model.base_model(input_ids=ids[:, :-1], use_cache=False, **inside).last_hidden_state
    return _losses(hidden @ model.get_output_embeddings().weight.T, ids)


def _losses(logits: Tensor, ids: Tensor) -> Tensor:
    return cross_entropy(logits[0].float(), ids[0, 1:], reduction="none")


def _require_same(own: Tensor, expected: Tensor, tolerance: float, complaint: str) -> None:
    same = (own - expected).abs() <= tolerance * expected.abs().mean()  # a NaN is not
    if same.float().mean() < 0.99:
        raise UserError(f"{complaint}, so its loss here would not be its own")

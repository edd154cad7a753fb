"""Where pre-training departs from the stock model: attention without a mask, a loss without logits, the plain form.

Each departure with its reason; upstream is transformers 5.23.

- `causal_sdpa`: under torch.compile stock `sdpa` hands the kernel a dense [T, T] mask with is_causal=False, and in
  eager mode it costs a device sync per forward (masking_utils.find_packed_sequence_indices, transformers#41856).
  A name without a mask function gets no mask. Until create_causal_mask can be told that nothing is packed.
- The loss: `ForCausalLMLoss` holds the logits of a whole batch in fp32, GPT-2's has no `loss_type`, so Trainer counts
  one token a row too many (transformers#46204 misses it), and neither knows of padding ids. Until a chunked
  cross-entropy for GPT-2 is upstream.
- `summed_loss` is a function of its own, so that torch.compile gets the loss and nothing else (see compilation.py).
- The plain form: what stock `GPT2LMHeadModel` saves, so that nobody needs this package to load it.
"""

import copy
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    MixtralForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_outputs import CausalLMOutput
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func
from transformers.utils.output_capturing import maybe_install_capturing_hooks

from gpt2_repro.batch_plan import IGNORED
from gpt2_repro.model.document_mask import Documents


# The largest piece of logits held at a time: 4,096 tokens at 50,304 ids, 0.8 GB in fp32.
LOGITS_PER_CHUNK = 2**28

AttentionInterface.register("causal_sdpa", sdpa_attention_forward)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Sum of negative log-likelihoods, with the gradients computed chunk by chunk in the forward pass."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, vocab_size: int, chunk: int) -> Tensor:
        wants_gradient = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        grad_hidden: list[Tensor] = []
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if wants_gradient else None
        for part, target in zip(hidden.split(chunk), labels.split(chunk), strict=True):
            counted = (target != IGNORED).unsqueeze(1)
            target = target.clamp_min(0).unsqueeze(1)
            logits = (part @ weight.T).float()
            logits[:, vocab_size:] = -torch.inf
            logit = logits.gather(1, target)
            largest = logits.amax(dim=1, keepdim=True)
            # One pass of exponentials serves the loss and its gradient.
            odds = logits.sub_(largest).exp_()
            normalizer = odds.sum(dim=1, keepdim=True)
            nll = normalizer.log() + largest - logit
            total += nll.masked_fill(~counted, 0.0).sum()
            if grad_weight is not None:
                gradient = _minus_one_at(odds.div_(normalizer), target).mul_(counted).to(hidden.dtype)
                grad_hidden.append(gradient @ weight)
                grad_weight += gradient.T @ part
        if grad_weight is not None:
            ctx.save_for_backward(torch.cat(grad_hidden), grad_weight.to(weight.dtype))
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * grad_outputs[0], grad_weight * grad_outputs[0], None, None, None


def _minus_one_at(probabilities: Tensor, target: Tensor) -> Tensor:
    """Subtract 1 at `target` [rows, 1], in place where nothing is compiled."""
    if torch.compiler.is_compiling():
        # A scatter would force the compiler to write all probabilities out in fp32 first.
        ids = torch.arange(probabilities.shape[1], device=target.device)
        return torch.where(ids == target, probabilities - 1, probabilities)
    return probabilities.scatter_add_(1, target, torch.full_like(target, -1, dtype=probabilities.dtype))


def chunked_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor, *, vocab_size: int) -> Tensor:
    """Sum over targets of -log p(label), without ever holding all logits.

    Matrix products run in the dtype of `hidden` (under autocast, in autocast's), softmax and sums in fp32.

    Args:
        hidden: [tokens, width].
        weight: [padded vocabulary, width]; ids from `vocab_size` up take no part in the softmax.
        labels: [tokens]; -100 is no target.
        vocab_size: ids that exist.

    Returns an fp32 scalar in nats.
    """
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    if not torch.is_grad_enabled():
        # A parameter still says that it wants a gradient, and the loss would compute one.
        hidden, weight = hidden.detach(), weight.detach()
    return _ChunkedCrossEntropy.apply(hidden.to(dtype), weight.to(dtype), labels, vocab_size, chunk_size(weight))


def chunk_size(weight: Tensor) -> int:
    """Tokens whose logits are held at a time: at most 2**28 logits.

    A power of two: products of odd heights leave part of a GPU idle.
    """
    return 1 << max(0, (LOGITS_PER_CHUNK // len(weight)).bit_length() - 1)


def summed_loss(model: PreTrainedModel, input_ids: Tensor, shift_labels: Tensor, **attention: Any) -> Tensor:
    """Return the sum of the negative log-likelihoods of `shift_labels` [rows, T]: an fp32 scalar in nats.

    torch.compile compiles this function. For a mixture of experts the gradient also has the load-balancing loss, by the
    targets of this pass; the value does not.

    Args:
        attention: further arguments of the model's forward, from `Documents.attention` (document_mask.py).
    """
    balances = model.balance_loss is not None and torch.is_grad_enabled()
    routers = {"output_router_logits": True} if balances else {}
    outputs = model.base_model(input_ids=input_ids, use_cache=False, **routers, **attention)
    hidden, head = outputs.last_hidden_state.flatten(0, 1), model.get_output_embeddings().weight
    loss = chunked_cross_entropy(hidden, head, shift_labels.flatten(), vocab_size=model.config.true_vocab_size)
    if balances:
        balance = model.balance_loss(outputs) * (shift_labels != IGNORED).sum()
        loss = loss + (balance - balance.detach())
    return loss


@torch.no_grad()
def target_losses(model: PreTrainedModel, input_ids: Tensor, shift_labels: Tensor) -> Tensor:
    """The negative log-likelihood of each target of `shift_labels` [rows, T], row by row: [targets] in nats, fp32.

    Logits are computed where a target is, and nowhere else.
    """
    hidden = model.base_model(input_ids=input_ids, use_cache=False).last_hidden_state
    wanted = shift_labels != IGNORED
    weight, vocab_size = model.get_output_embeddings().weight, model.config.true_vocab_size
    losses = []
    chunk = chunk_size(weight)
    for part, target in zip(hidden[wanted].split(chunk), shift_labels[wanted].split(chunk), strict=True):
        logits = (part @ weight.T)[:, :vocab_size].float()
        losses.append(torch.nn.functional.cross_entropy(logits, target, reduction="none"))
    return torch.cat(losses)


def _forward(
    self: PreTrainedModel,
    input_ids: Tensor,
    labels: Tensor | None = None,
    shift_labels: Tensor | None = None,
    num_items_in_batch: Tensor | int | None = None,
    reduction: str = "mean",
    **kwargs: Any,
) -> Any:
    """The pre-training forward.

    With `shift_labels` [rows, T]: the sum of the negative log-likelihoods divided by `num_items_in_batch`, or by the
    targets of this batch; an fp32 scalar in nats. With `reduction` "none": that of each target [targets], for rows
    without document masks. Without `shift_labels`: the stock forward, with logits [rows, T, true_vocab_size].
    """
    # `**kwargs` must stay: Trainer passes num_items_in_batch only to a forward that has it.
    if shift_labels is None:
        if labels is not None:
            raise ValueError("pre-training takes labels that are already shifted: pass shift_labels")
        outputs = type(self).forward(self, input_ids=input_ids, **kwargs)
        outputs.logits = outputs.logits[..., : self.config.true_vocab_size]
        return outputs
    if reduction == "none":
        return CausalLMOutput(loss=target_losses(self, input_ids, shift_labels))
    denominator = (shift_labels != IGNORED).sum() if num_items_in_batch is None else num_items_in_batch
    attention = self.documents.attention(self, input_ids) if self.documents else {}
    return CausalLMOutput(loss=self.summed_loss(input_ids, shift_labels, **attention) / denominator)


def make_pretraining(
    model: PreTrainedModel, *, vocab_size: int, documents: Documents | None = None
) -> PreTrainedModel:
    """Give this instance the pre-training forward.

    Args:
        vocab_size: ids that exist, without padding.
        documents: which the loss of packed rows keeps apart; None lets attention run across them.

    The instance, not a subclass: a subclass would leak into `architectures` of every saved config.
    """
    model.config.true_vocab_size = vocab_size
    model.documents = documents
    model.balance_loss = balance_loss(model)
    model.summed_loss = MethodType(summed_loss, model)
    model.forward = MethodType(_forward, model)
    # Activation checkpointing hooks the embeddings for models of which only a part is trained. Here every weight is,
    # and torch 2.9 cannot compile the hook.
    model.enable_input_require_grads = lambda: None
    return model


def balance_loss(model: PreTrainedModel) -> Callable[[Any], Tensor] | None:
    """Return the function that computes the load-balancing loss from outputs of the base model with router logits.

    It is Mixtral's (Fedus et al. 2021, arXiv:2101.03961) times router_aux_loss_coef. None for a model without one.
    """
    if not isinstance(model, MixtralForCausalLM) or not (coefficient := model.config.router_aux_loss_coef):
        return None
    maybe_install_capturing_hooks(model.base_model)  # of router logits; torch.compile cannot install them
    experts = model.num_experts, model.num_experts_per_tok
    return lambda outputs: coefficient * load_balancing_loss_func(outputs.router_logits, *experts)


def plain_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The configuration that stock transformers would save for this architecture: no key of ours, its own defaults."""
    plain = copy.deepcopy(config)
    if hasattr(plain, "true_vocab_size"):
        plain.vocab_size = plain.true_vocab_size
        del plain.true_vocab_size
    if getattr(plain, "activation_function", None) == "gelu_pytorch_tanh":
        plain.activation_function = "gelu_new"  # the same function; the name every GPT-2 checkpoint carries
    plain.use_cache = True
    plain.dtype = torch.float32
    plain._attn_implementation = None
    return plain


def plain_model(config: PreTrainedConfig, weights: dict[str, Tensor]) -> PreTrainedModel:
    """A stock fp32 model of the true vocabulary from training weights, which may be padded and of any float dtype.

    Raises ValueError for a weight that is missing or that the architecture does not have.
    """
    padded = copy.deepcopy(config)
    target = plain_config(config)
    padded._attn_implementation = "sdpa"
    if hasattr(padded, "activation_function"):
        # Else the last digits change when it is saved and loaded.
        padded.activation_function = target.activation_function
    model = AutoModelForCausalLM.from_config(padded, dtype=torch.float32)
    missing, extra = model.load_state_dict({name: weight.float() for name, weight in weights.items()}, strict=False)
    if wrong := {*missing, *extra} - set(model.all_tied_weights_keys):
        raise ValueError(f"weights are missing, or this architecture does not have them: {sorted(wrong)[:3]}")
    model.tie_weights()
    if target.vocab_size != padded.vocab_size:
        model.resize_token_embeddings(target.vocab_size)
    model.config = target
    model.generation_config = type(model.generation_config).from_model_config(target)
    return model.eval()

"""Where pre-training departs from the stock model: attention without a mask, a loss without logits, the plain form.

Each departure with its reason; upstream is transformers 5.23.

- `causal_sdpa`: under torch.compile stock `sdpa` hands the kernel a dense [T, T] mask with is_causal=False, and in
  eager mode it costs a device sync per forward (masking_utils.find_packed_sequence_indices, transformers#41856).
  A name without a mask function gets no mask. Until create_causal_mask can be told that nothing is packed.
- The loss: `ForCausalLMLoss` holds the logits of a whole batch in fp32, GPT-2's has no `loss_type`, so Trainer counts
  one token a row too many (transformers#46204 misses it), and neither knows of padding ids. Until a chunked
  cross-entropy for GPT-2 is upstream.
- The plain form: what stock `GPT2LMHeadModel` saves, so that nobody needs this package to load it.
"""

import copy
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_outputs import CausalLMOutput


IGNORED = -100  # the label of a position that is no target
# The largest piece of logits held at a time: 1 GB in fp32, 5,336 tokens at 50,304 ids.
LOGITS_PER_CHUNK = 2**28

AttentionInterface.register("causal_sdpa", sdpa_attention_forward)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Sum of negative log-likelihoods, with the gradients computed chunk by chunk in the forward pass."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, vocab_size: int, chunk: int) -> Tensor:
        wants_gradient = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if wants_gradient else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if wants_gradient else None
        for start in range(0, len(hidden), chunk):
            part, target = hidden[start : start + chunk], labels[start : start + chunk]
            counted = target != IGNORED
            target = target.clamp_min(0).unsqueeze(1)
            logits = (part @ weight.T).float()
            logits[:, vocab_size:] = -torch.inf
            log_normalizer = logits.logsumexp(dim=1, keepdim=True)
            nll = (log_normalizer - logits.gather(1, target)).squeeze(1)
            total += nll.masked_fill(~counted, 0.0).sum()
            if grad_hidden is not None and grad_weight is not None:
                gradient = logits.sub_(log_normalizer).exp_()
                gradient.scatter_add_(1, target, torch.full_like(target, -1, dtype=gradient.dtype))
                gradient = gradient.mul_(counted.unsqueeze(1)).to(hidden.dtype)
                grad_hidden[start : start + chunk] = gradient @ weight
                grad_weight += gradient.T @ part
        if grad_hidden is not None and grad_weight is not None:
            ctx.save_for_backward(grad_hidden, grad_weight.to(weight.dtype))
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * grad_outputs[0], grad_weight * grad_outputs[0], None, None, None


def chunked_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, vocab_size: int, chunk: int | None = None
) -> Tensor:
    """Sum over targets of -log p(label), without ever holding all logits.

    Matrix products run in the dtype of `hidden` (under autocast, in autocast's), softmax and sums in fp32.

    Args:
        hidden: [tokens, width].
        weight: [padded vocabulary, width]; ids from `vocab_size` up take no part in the softmax.
        labels: [tokens]; -100 is no target.
        vocab_size: ids that exist.
        chunk: tokens at a time; by default as many as make 2**28 logits.

    Returns an fp32 scalar in nats.
    """
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    chunk = chunk or max(1, LOGITS_PER_CHUNK // len(weight))
    return _ChunkedCrossEntropy.apply(hidden.to(dtype), weight.to(dtype), labels, vocab_size, chunk)


def _forward(
    self: PreTrainedModel,
    input_ids: Tensor,
    labels: Tensor | None = None,
    shift_labels: Tensor | None = None,
    num_items_in_batch: Tensor | int | None = None,
    **kwargs: Any,
) -> Any:
    """With `shift_labels` [rows, T], the loss alone: the sum over targets divided by `num_items_in_batch`, or by the
    targets of this batch. Without, the stock forward, its logits cut to the ids that exist.
    """
    if shift_labels is None:
        if labels is not None:
            raise ValueError("pre-training takes labels that are already shifted: pass shift_labels")
        outputs = type(self).forward(self, input_ids=input_ids, **kwargs)
        outputs.logits = outputs.logits[..., : self.config.true_vocab_size]
        return outputs
    hidden = self.base_model(input_ids=input_ids, use_cache=False).last_hidden_state
    total = chunked_cross_entropy(
        hidden.flatten(0, 1),
        self.get_output_embeddings().weight,
        shift_labels.flatten(),
        vocab_size=self.config.true_vocab_size,
    )
    targets = (shift_labels != IGNORED).sum() if num_items_in_batch is None else num_items_in_batch
    return CausalLMOutput(loss=total / targets)


def make_pretraining(model: PreTrainedModel, *, vocab_size: int) -> PreTrainedModel:
    """Give this instance the pre-training forward. `vocab_size`: ids that exist, without padding.

    The instance, not a subclass: a subclass would leak into `architectures` of every saved config.
    """
    model.config.true_vocab_size = vocab_size
    model.forward = MethodType(_forward, model)
    return model


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

    Raises KeyError for a weight that is missing and ValueError for one that the architecture does not have.
    """
    padded = copy.deepcopy(config)
    target = plain_config(config)
    padded._attn_implementation = "sdpa"
    model = AutoModelForCausalLM.from_config(padded, dtype=torch.float32)
    wanted = set(model.state_dict())
    if extra := weights.keys() - wanted:
        raise ValueError(f"weights that this architecture does not have: {sorted(extra)[:3]}")
    tied = set(model.all_tied_weights_keys)
    if missing := wanted - weights.keys() - tied:
        raise KeyError(f"weights are missing: {sorted(missing)[:3]}")
    model.load_state_dict({name: weight.float() for name, weight in weights.items()}, strict=False)
    model.tie_weights()
    if target.vocab_size != padded.vocab_size:
        model.resize_token_embeddings(target.vocab_size)
    model.config = target
    model.generation_config = type(model.generation_config).from_model_config(target)
    return model.eval()

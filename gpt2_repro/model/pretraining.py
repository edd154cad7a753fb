"""Replace the loss and the attention of transformers models for pre-training."""

import copy
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.initialization import no_init_weights
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_outputs import CausalLMOutput
from transformers.utils.output_capturing import maybe_install_capturing_hooks

from gpt2_repro.errors import in_a_line
from gpt2_repro.model.document_mask import Documents
from gpt2_repro.model.gelu_products import gelu_mlp
from gpt2_repro.model.packed_attention import is_training_batch, packed_attention, product_dtype
from gpt2_repro.model.size import NO_LIMIT, experts_of, max_positions, tokens_per_chunk
from gpt2_repro.tokens import IGNORED


# The compiler of torch 2.9 has no products of bf16 matrices with an fp32 result (pytorch#163393).
FP32_PRODUCTS = torch.__version__ >= (2, 10) and torch.version.hip is None  # not tried with ROCm


# Attention without a mask tensor: transformers (5.23) creates no mask for an attention name without a mask function.
# Under torch.compile stock `sdpa` passes a dense [T, T] mask with is_causal=False to the kernel. In eager mode stock
# `sdpa` costs a host sync per forward (masking_utils.find_packed_sequence_indices, transformers#41856). Needed until
# create_causal_mask has an option for rows that are not packed.
AttentionInterface.register("causal_sdpa", sdpa_attention_forward)


SDPA = ("causal_cudnn", "causal_sdpa")
PACKED = "packed_cudnn"
_OTHERS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def _cudnn(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any) -> Any:
    backends = _OTHERS
    length = query.shape[2]
    if attention_mask is None and length % 128 == 0:
        backends = [SDPBackend.CUDNN_ATTENTION, *_OTHERS]
    with sdpa_kernel(backends, set_priority=True):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)


AttentionInterface.register("causal_cudnn", _cudnn)
AttentionInterface.register(PACKED, _cudnn)  # for passes that `_attend` leaves to the stock module


# Types of devices on which the softmax of the loss is a Triton kernel. Not tried with ROCm.
TRITON_DEVICES: tuple[str, ...] = ()
if torch.version.cuda and importlib.util.find_spec("triton"):
    TRITON_DEVICES = ("cuda",)


@torch.library.custom_op("gpt2_repro::cross_entropy_in_place", mutates_args=("logits",))
def cross_entropy_in_place(logits: Tensor, labels: Tensor, vocab_size: int) -> Tensor:
    """Return the loss of each row, and replace logits by their gradient. See `softmax_kernel.replace_by_gradient`."""
    from gpt2_repro.model import softmax_kernel  # imports Triton, which is only there with CUDA

    return softmax_kernel.replace_by_gradient(logits, labels, vocab_size)


@cross_entropy_in_place.register_fake
def _losses(logits: Tensor, labels: Tensor, vocab_size: int) -> Tensor:
    return logits.new_empty(len(logits), dtype=torch.float32)


def launch_softmax_kernel(config: PreTrainedConfig, device: torch.device, dtype: torch.dtype) -> str | None:
    """Launch the Triton kernel of the loss on one row, if it would be used, and return the error or None.

    `config` is the configuration of a model for training. A successful launch has compiled the kernel for the run.
    """
    if device.type not in TRITON_DEVICES:
        return None
    logits = torch.zeros(1, config.vocab_size, dtype=dtype, device=device)
    labels = torch.zeros(1, dtype=torch.long, device=device)
    try:
        losses = cross_entropy_in_place(logits, labels, config.true_vocab_size)
        losses.item()  # a host sync: launches are asynchronous
    # Triton raises errors of many kinds: RuntimeError without a compiler, CalledProcessError without Python.h, PTXASError
    # for GPUs before sm_70, OSError for a cache that cannot be written.
    except Exception as error:
        return in_a_line(error)
    return None


def use_torch_softmax() -> None:
    """Do not use the Triton kernel of the loss in this process."""
    global TRITON_DEVICES
    TRITON_DEVICES = ()


# transformers' ForCausalLMLoss (5.23) holds the logits of a complete batch in fp32, and includes padding ids of the
# vocabulary in the softmax. Needed until transformers has a chunked cross-entropy for GPT-2.
class _ChunkedCrossEntropy(torch.autograd.Function):
    """Sum of negative log-likelihoods, with gradients computed in the forward pass."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, vocab_size: int, chunk: int) -> Tensor:
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        grad_hidden: list[Tensor] = []
        grad_weight: Tensor | None = None
        trains = any(ctx.needs_input_grad)
        for hidden_chunk, label_chunk in zip(hidden.split(chunk), labels.split(chunk), strict=True):
            losses, grad_logits = _cross_entropy(hidden_chunk, weight, label_chunk, vocab_size, trains)
            # Not in place: torch 2.11 compiles an output that was changed in place without its gradients.
            total = total + losses.sum()
            if grad_logits is not None:
                grad_hidden.append(grad_logits @ weight)
                product = _fp32_product(grad_logits.T, hidden_chunk)
                if grad_weight is None:
                    grad_weight = product
                else:
                    grad_weight.add_(product)
            del grad_logits  # otherwise it stays in memory while the next chunk is computed
        if grad_weight is not None:
            # A sum over all tokens can exceed the range of fp16. It is rounded after it is scaled.
            saved_dtype = weight.dtype
            if saved_dtype == torch.float16:
                saved_dtype = torch.float32
            ctx.save_for_backward(torch.cat(grad_hidden), grad_weight.to(saved_dtype))
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        scale = grad_outputs[0]
        scaled_weight = (grad_weight * scale).to(grad_hidden.dtype)
        return grad_hidden * scale, scaled_weight, None, None, None


def _cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, vocab_size: int, trains: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the losses of rows in fp32 [rows], and the gradient of their logits [rows, padded vocabulary].

    Without `trains`, the gradient is None.
    """
    if trains and hidden.device.type in TRITON_DEVICES:
        logits = hidden @ weight.T
        losses = cross_entropy_in_place(logits, labels, vocab_size)
        return losses, logits  # these are the gradients now
    is_target = (labels != IGNORED).unsqueeze(1)
    target = labels.clamp_min(0).unsqueeze(1)
    logits = (hidden @ weight.T).float()  # the product is freed here; as an argument, it could live until the return
    logits[:, vocab_size:] = -torch.inf
    target_logit = logits.gather(1, target)
    largest = logits.amax(dim=1, keepdim=True)
    # One pass of exponentials, in the memory of the logits, serves the loss and its gradient.
    exponentials = logits.sub_(largest).exp_()
    normalizer = exponentials.sum(dim=1, keepdim=True)
    log_normalizer = normalizer.log()
    losses = log_normalizer - (target_logit - largest)
    losses = losses.masked_fill(~is_target, 0.0)
    if not trains:
        return losses, None
    probabilities = exponentials.div_(normalizer)
    grad_logits = _minus_one_at(probabilities, target).mul_(is_target)
    return losses, grad_logits.to(hidden.dtype)


def _fp32_product(left: Tensor, right: Tensor) -> Tensor:
    """Return the product of two matrices in fp32."""
    if left.is_cuda and FP32_PRODUCTS:  # on a CPU, torch.mm has no out_dtype
        return torch.mm(left, right, out_dtype=torch.float32)
    if left.dtype == torch.float16:  # the sums can exceed the range of fp16
        left = left.float()
        right = right.float()
    return torch.mm(left, right).float()


def _minus_one_at(probabilities: Tensor, target: Tensor) -> Tensor:
    """Subtract 1 from the probability of each row's target, and return the result.

    `target` has shape [rows, 1]. `probabilities` may be changed in place.
    """
    if torch.compiler.is_compiling():
        # A scatter would force the compiler to store all probabilities in fp32 first.
        ids = torch.arange(probabilities.shape[1], device=target.device)
        return torch.where(ids == target, probabilities - 1, probabilities)
    minus_one = torch.full_like(target, -1, dtype=probabilities.dtype)
    return probabilities.scatter_add_(1, target, minus_one)


def chunked_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor, *, vocab_size: int) -> Tensor:
    """Return the sum of -log p(label) over all targets, without storing all logits.

    The result is an fp32 scalar in nats. Matrix products use autocast's dtype if autocast is on, otherwise the
    dtype of `hidden`.

    Args:
        hidden: the hidden states, of shape [tokens, width].
        weight: the output embedding, of shape [padded vocabulary, width].
        labels: the ids to predict, of shape [tokens]. A label of -100 is not a target.
        vocab_size: the number of ids without padding. Padding ids are excluded from the softmax.
    """
    dtype = product_dtype(hidden)
    if not torch.is_grad_enabled():
        # A parameter still has requires_grad, so the loss would compute a gradient.
        hidden = hidden.detach()
        weight = weight.detach()
    chunk = chunk_size(weight)
    return _ChunkedCrossEntropy.apply(hidden.to(dtype), weight.to(dtype), labels, vocab_size, chunk)


def chunk_size(weight: Tensor) -> int:
    """Return the number of tokens whose logits are computed at a time."""
    memory = 0
    if weight.is_cuda:
        memory = torch.cuda.get_device_properties(weight.device).total_memory
    return tokens_per_chunk(len(weight), memory)


def summed_loss(model: PreTrainedModel, input_ids: Tensor, shift_labels: Tensor, **attention: Any) -> Tensor:
    """Return the sum of the negative log-likelihoods of `shift_labels`.

    `shift_labels` has shape [rows, T]. The result is an fp32 scalar in nats.

    Args:
        attention: arguments of the model's forward, from `Documents.attention`.
    """
    balances = model.balance_loss is not None and torch.is_grad_enabled()
    if balances:
        attention["output_router_logits"] = True
    outputs = model.base_model(input_ids=input_ids, use_cache=False, **attention)
    hidden = outputs.last_hidden_state.flatten(0, 1)
    head = model.get_output_embeddings()
    labels = shift_labels.flatten()
    loss = chunked_cross_entropy(hidden, head.weight, labels, vocab_size=model.config.true_vocab_size)
    if balances:
        # The load-balancing loss contributes to the gradient, but not to the returned value.
        num_targets = (shift_labels != IGNORED).sum()
        balance = model.balance_loss(outputs) * num_targets
        loss = loss + (balance - balance.detach())
    return loss


@torch.no_grad()
def target_losses(model: PreTrainedModel, input_ids: Tensor, shift_labels: Tensor) -> Tensor:
    """Return the loss of each target, in fp32 nats [targets]. `shift_labels`: [rows, T]."""
    outputs = model.base_model(input_ids=input_ids, use_cache=False)
    hidden = outputs.last_hidden_state
    is_target = shift_labels != IGNORED
    weight = model.get_output_embeddings().weight
    vocab_size = model.config.true_vocab_size
    losses: list[Tensor] = []
    chunk = chunk_size(weight)
    hidden_chunks = hidden[is_target].split(chunk)
    label_chunks = shift_labels[is_target].split(chunk)
    for hidden_chunk, labels in zip(hidden_chunks, label_chunks, strict=True):
        logits = (hidden_chunk @ weight.T)[:, :vocab_size].float()
        losses_of_chunk = cross_entropy(logits, labels, reduction="none")
        losses.append(losses_of_chunk)
        del logits  # as in _ChunkedCrossEntropy
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
    """Return the pre-training loss, or logits if `shift_labels` is None.

    `shift_labels` has shape [rows, T], and logits have shape [rows, T, true_vocab_size]. The loss is the sum of
    negative log-likelihoods in nats, divided by `num_items_in_batch`. If `num_items_in_batch` is None, the divisor is
    the number of targets in this batch.

    If `reduction` is "none", return the loss of each target, of shape [targets]. No document mask is applied then.
    """
    # Keep `**kwargs`: Trainer passes num_items_in_batch only to a forward that has it.
    if shift_labels is None:
        if labels is not None:
            raise ValueError("Pre-training needs shifted labels. Pass shift_labels.")
        outputs = type(self).forward(self, input_ids=input_ids, **kwargs)
        outputs.logits = outputs.logits[..., : self.config.true_vocab_size]
        return outputs
    if reduction == "none":
        losses = target_losses(self, input_ids, shift_labels)
        return CausalLMOutput(loss=losses)
    # PretrainingTrainer passes its own count. Trainer (5.23) counts one target too many per row, because GPT-2 has no
    # `loss_type` (transformers#46204 does not fix this).
    denominator = num_items_in_batch
    if denominator is None:
        denominator = (shift_labels != IGNORED).sum()
    attention = {}
    if self.documents:
        attention = self.documents.attention(self, input_ids)
    total = self.summed_loss(input_ids, shift_labels, **attention)
    return CausalLMOutput(loss=total / denominator)


def make_pretraining(
    model: PreTrainedModel, *, vocab_size: int, documents: Documents | None = None
) -> PreTrainedModel:
    """Replace a model's forward by the pre-training forward, and return the model.

    Args:
        vocab_size: the number of ids of the tokenizer, without vocabulary padding.
        documents: if given, tokens attend only to their own document.
    """
    # cuDNN's attention is wrong for explicit masks and for lengths that are not a multiple of 128 (pytorch#196678,
    # #169849, #193893). `causal_cudnn` turns it on where it is right.
    torch.backends.cuda.enable_cudnn_sdp(False)
    model.config.true_vocab_size = vocab_size
    model.documents = documents
    model.balance_loss = balance_loss(model)
    # A separate function, so that torch.compile compiles the loss and nothing more (see build.py).
    model.summed_loss = MethodType(summed_loss, model)
    # Not a subclass, because its name would be in each saved config (`architectures`).
    model.forward = MethodType(_forward, model)
    # Activation checkpointing adds a hook to the embeddings, for models that are partly frozen. Here all weights are
    # trained, and torch 2.9 cannot compile the hook.
    model.enable_input_require_grads = lambda: None
    return model


class _BiasGradient(torch.autograd.Function):
    """Pass a projection through, and sum the gradient of its bias over the positions of a row first."""

    @staticmethod
    def forward(ctx: Any, projection: Tensor, bias: Tensor) -> Tensor:
        ctx.dtype = bias.dtype
        return projection.view_as(projection)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        [grad_projection] = gradients
        per_row = grad_projection.sum(1, dtype=torch.float32)
        grad_bias = per_row.sum(0).to(ctx.dtype)
        return grad_projection, grad_bias


def _project(self: Any, inputs: Tensor) -> Tensor:
    """Replace the forward of transformers' Conv1D."""
    positions = inputs.view(-1, inputs.shape[-1])
    projection = torch.addmm(self.bias.detach(), positions, self.weight)
    shape = (*inputs.shape[:-1], self.nf)
    projection = projection.view(shape)
    return _BiasGradient.apply(projection, self.bias)


def sum_biases_by_row(model: PreTrainedModel) -> None:
    """Sum the bias gradients of a GPT-2 where they are computed.

    On GPUs inductor (torch 2.13) splits a sum over all positions in a way that cannot be fused. So it writes the
    gradient of GELU, and of queries, keys and values, and reads it again. A sum over the positions of a row is fused.
    """
    for block in model.base_model.h:
        for projection in (block.attn.c_attn, block.mlp.c_fc):
            projection.forward = MethodType(_project, projection)


def _attend(
    self: Any, hidden_states: Tensor, past_key_values: Any = None, attention_mask: Any = None, **others: Any
) -> Any:
    """Replace the forward of transformers' GPT2Attention."""
    is_packed = self.config._attn_implementation == PACKED  # compile_loss may have replaced the kernel
    is_plain = past_key_values is None and attention_mask is None
    if not (is_packed and is_plain and is_training_batch(hidden_states)):
        return type(self).forward(self, hidden_states, past_key_values, attention_mask, **others)
    out = packed_attention(self.c_attn(hidden_states), self.num_heads)
    return self.resid_dropout(self.c_proj(out)), None


def use_packed_attention(model: PreTrainedModel) -> None:
    """Write the gradients of a GPT-2's queries, keys and values into one tensor, in training and validation.

    Prediction: 2 % of a step, the copies of these gradients on an H200 (benchmarks/RESULTS.md).
    """
    for block in model.base_model.h:
        block.attn.forward = MethodType(_attend, block.attn)


def _mlp(self: Any, hidden_states: Tensor) -> Tensor:
    """Replace the forward of transformers' GPT2MLP."""
    if not is_training_batch(hidden_states):
        return type(self).forward(self, hidden_states)
    up, down = self.c_fc, self.c_proj
    out = gelu_mlp(hidden_states.flatten(0, 1), up.weight, up.bias, down.weight, down.bias)
    return self.dropout(out.view_as(hidden_states))


def use_gelu_products(model: PreTrainedModel) -> None:
    """Compute a GPT-2's GELU inside the products of its MLPs, in training and validation.

    Prediction: 3 to 5 % of a step on an H200.
    """
    for block in model.base_model.h:
        block.mlp.forward = MethodType(_mlp, block.mlp)


def balance_loss(model: PreTrainedModel) -> Callable[[Any], Tensor] | None:
    """Return a function that computes the load-balancing loss of a mixture of experts.

    The returned function takes the base model's output, which must contain router logits. The result is None if the
    architecture has no such loss, or if the loss has the coefficient 0.
    """
    module_name = type(model).__module__
    module = sys.modules[module_name]
    function = getattr(module, "load_balancing_loss_func", None)
    coefficient = getattr(model.config, "router_aux_loss_coef", 0)
    if function is None or not coefficient:
        return None
    maybe_install_capturing_hooks(model.base_model)  # hooks for router logits; torch.compile cannot install them
    recomputed = "skip_fwd_side_effects_in_bwd_under_checkpoint"
    if hasattr(torch._dynamo.config, recomputed):  # torch 2.9 does not have it
        # The hooks need not run again when blocks are recomputed.
        setattr(torch._dynamo.config, recomputed, True)
    experts, chosen = experts_of(model.config)

    def balance(outputs: Any) -> Tensor:
        """Return the loss of Fedus et al. 2021, arXiv:2101.03961."""
        loss = function(outputs.router_logits, experts, chosen)
        return coefficient * loss

    return balance


def plain_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return a copy of `config` as stock transformers would save it."""
    plain = copy.deepcopy(config)
    if hasattr(plain, "true_vocab_size"):
        plain.vocab_size = plain.true_vocab_size
        del plain.true_vocab_size
    if getattr(plain, "activation_function", None) == "gelu_pytorch_tanh":
        plain.activation_function = "gelu_new"  # the same function, named as in GPT-2 checkpoints
    plain.use_cache = True
    plain.dtype = torch.float32
    plain._attn_implementation = None
    return plain


def plain_model(config: PreTrainedConfig, weights: dict[str, Tensor]) -> PreTrainedModel:
    """Return transformers' own model with the weights of a training model, in fp32.

    Padding of the vocabulary is removed.

    Raises ValueError for missing weights, and for weights that the architecture does not have.
    """
    target = plain_config(config)
    padded = plain_config(config)
    padded.vocab_size = config.vocab_size
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(padded, dtype=torch.float32)
    in_fp32 = {name: weight.float() for name, weight in weights.items()}
    missing, extra = model.load_state_dict(in_fp32, strict=False)
    wrong = {*missing, *extra}
    wrong.difference_update(model.all_tied_weights_keys)
    if wrong:
        first_names = sorted(wrong)[:3]
        raise ValueError(f"Weights are missing or unknown to this architecture: {first_names}.")
    model.tie_weights()
    if target.vocab_size != padded.vocab_size:
        model.resize_token_embeddings(target.vocab_size)
    model.config = target
    model.generation_config = GenerationConfig.from_model_config(target)
    return model.eval()


def save_plain(model: PreTrainedModel, folder: Path) -> None:
    """Write a stock model, such as that of `plain_model`."""
    if model.config.model_type == "gpt2":
        # transformers 5 does not write this key, and llama.cpp's convert_hf_to_gguf.py reads it.
        model.config.n_ctx = model.config.n_positions
    generation = model.generation_config
    positions = max_positions(model.config)
    has_length = generation.max_length is not None or generation.max_new_tokens is not None
    if not has_length and positions < NO_LIMIT:
        # Otherwise a pipeline of transformers generates 256 tokens, more than the positions of a small model.
        generation.max_length = positions
    model.save_pretrained(folder)

"""Build the model to train and choose its attention implementation."""

import importlib.metadata
import importlib.util
import math

import torch
from transformers import AutoModelForCausalLM, GPT2Config, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from gpt2_repro.errors import UserError
from gpt2_repro.model.compilation import compile_loss
from gpt2_repro.model.configuration import stock_model
from gpt2_repro.model.document_mask import Documents
from gpt2_repro.model.initial_weights import start_from
from gpt2_repro.model.pretraining import make_pretraining


def build_model(
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    attention: str,
    init_from: str = "",
    documents: Documents | None = None,
    compiled: bool = False,
) -> PreTrainedModel:
    """Return an fp32 model whose forward computes the pre-training loss.

    Args:
        tokenizer: the tokenizer of the data. The checkpoint `init_from` must have the same tokenizer.
        init_from: a folder or Hub id with initial weights. If empty, weights are random.
        documents: if given, tokens attend only to their own document.

    Raises UserError if the checkpoint `init_from` cannot be loaded, or does not match the model or the data.
    """
    model = stock_model(config, attention=attention)
    if init_from:
        start_from(init_from, model, tokenizer)
    make_pretraining(model, vocab_size=config.true_vocab_size, documents=documents)
    if compiled:
        compile_loss(model)
    return model


def choose_attention(
    requested: str, *, cuda: bool, bf16: bool, one_row_compiled: bool = False, document_mask: bool = False
) -> tuple[str, str]:
    """Return the attention implementation to use and the reason for the choice.

    Args:
        requested: the field attn_implementation of the recipe.
        one_row_compiled: whether torch.compile is used with one row per forward pass.

    Raises UserError if flash_attention_2 is requested and cannot be used.
    """
    if requested in ("causal_sdpa", "eager"):
        return requested, "as requested"
    obstacle = _flash_obstacle(cuda=cuda, bf16=bf16, document_mask=document_mask)
    if one_row_compiled and not obstacle and not document_mask:
        # _is_packed_sequence in transformers 5.23 branches on the position ids. Position ids are not read if the
        # lengths of documents are passed.
        obstacle = "torch.compile cannot compile transformers' flash attention for a micro-batch of 1 row"
    if requested == "flash_attention_2":
        if obstacle:
            raise UserError(f"flash_attention_2 cannot be used: {obstacle}. Pass --attn_implementation auto.")
        return requested, "as requested"
    if obstacle:
        mask = "with a document mask" if document_mask else "without a mask"
        return "causal_sdpa", f"torch's SDPA {mask}, because {obstacle}"
    return "flash_attention_2", f"flash-attn {importlib.metadata.version('flash-attn')} agrees with SDPA"


def _flash_obstacle(*, cuda: bool, bf16: bool, document_mask: bool) -> str | None:
    if not cuda:
        return "there is no GPU"
    if importlib.util.find_spec("flash_attn") is None:
        return "flash-attn is not installed (requirements-gpu.txt)"
    if not bf16:
        return "flash-attn needs bf16, which this run does not use"
    if torch.cuda.get_device_capability() < (8, 0):
        return "this GPU is older than Ampere"
    try:
        difference = attention_difference("flash_attention_2", "sdpa", device="cuda", document_mask=document_mask)
    except (ImportError, RuntimeError) as error:
        return f"flash-attn fails on this machine ({str(error).splitlines()[0]})"
    # bf16 keeps 8 bits: correct outputs and gradients of unit scale agree within a few percent, wrong ones do not.
    return None if difference < 0.05 else f"flash-attn differs from SDPA by {difference:.3f}"


def attention_difference(one: str, other: str, *, device: str, document_mask: bool = False) -> float:
    """Return the largest difference between two attention implementations in bf16.

    Outputs and gradients are compared, relative to the largest absolute value of `other`. This function sets torch's
    global seed.
    """
    none = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0, "bos_token_id": None, "eos_token_id": None}
    config = GPT2Config(n_layer=1, n_head=4, n_embd=256, vocab_size=512, n_positions=128, **none)
    ids = torch.arange(256, device=device).view(2, 128) % (37 if document_mask else 512)
    results: list[list[torch.Tensor]] = []
    for implementation in (one, other):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=implementation)
        model = model.to(device)
        inside = Documents(separator=0).attention(model, ids) if document_mask else {}
        hidden = model.base_model(ids, use_cache=False, **inside).last_hidden_state.float()
        # A random direction, not a norm. After a LayerNorm the norm is the same for all weights, and its gradient is
        # rounding noise.
        direction = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(1)).to(device)
        (hidden * direction).mean().backward()
        results.append([hidden.detach(), model.base_model.h[0].attn.c_attn.weight.grad.float()])
    differences = torch.stack([(a - b).abs().max() / b.abs().max() for a, b in zip(*results, strict=True)])
    return float(differences.max()) if differences.isfinite().all() else math.inf

"""Check that an architecture of transformers can be pre-trained here, and give it GPT-2's initialization."""

import copy
import math
import re
import sys

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from gpt2_repro.errors import UserError
from gpt2_repro.model.configuration import FAILURES, reason_of, stock_model
from gpt2_repro.model.document_mask import Documents
from gpt2_repro.model.pretraining import make_pretraining
from gpt2_repro.model.size import experts_of


LENGTH = 512  # tokens of the row that is checked
VOCABULARY = 256
LOSS_TOLERANCE = 1e-4  # nats per token
# Weights whose product is added to the residual stream, in the families of transformers.
RESIDUAL = re.compile(
    r"(c_proj|o_proj|out_proj|down_proj|fc2|fc_out|attention\.dense|self_attn\.dense|dense_4h_to_h)(\.weight)?$"
)


def scale_residual_weights(model: PreTrainedModel) -> None:
    """Divide the initial weights of residual projections by sqrt(2 * number of blocks).

    This is GPT-2's initialization (Radford et al. 2019, section 2.3). In transformers few other models have it.
    """
    if model.config.model_type in ("gpt2", "gpt_bigcode"):  # transformers scales them
        return
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if RESIDUAL.search(name):
                weight.div_(math.sqrt(2 * model.config.num_hidden_layers))


def check_architecture(config: PreTrainedConfig, *, document_mask: bool = False) -> None:
    """Compare the pre-training loss of a small copy of a model with the loss of transformers' own model.

    The copy has few blocks, a vocabulary of 256 ids, and random weights in fp32.

    Raises UserError if the losses differ, a parameter gets no gradient, a token sees later tokens, or a document mask
    does not separate the documents of a row.
    """
    small = copy.deepcopy(config)
    small.num_hidden_layers = min(config.num_hidden_layers, _blocks_with_each_kind(config))
    small.vocab_size = VOCABULARY
    small.bos_token_id = None
    small.eos_token_id = None
    positions = config.max_position_embeddings
    for key, size in vars(config).items():
        is_window = "window" in key and isinstance(size, int)
        if is_window and size < positions:
            window = min(size, LENGTH // 2, positions // 2)  # so that the row shows a window
            setattr(small, key, window)
    small.initializer_range = 0.02  # extreme values would hide differences
    small.output_router_logits = False  # the stock loss would contain the load-balancing loss
    try:
        with torch.random.fork_rng(devices=[]):
            problem = _difference(small, document_mask=document_mask)
    except FAILURES as error:
        problem = reason_of(error)
    if problem:
        raise UserError(f"--model_type {config.model_type} cannot be trained here: {problem}.")


def _blocks_with_each_kind(config: PreTrainedConfig) -> int:
    """Return how many blocks, but at least 2, contain one block of each kind."""
    kinds = getattr(config, "layer_types", None)
    if not kinds:
        kinds = getattr(config, "layers_block_type", None) or []
    blocks = 2
    for kind in kinds:
        first = kinds.index(kind)
        blocks = max(blocks, first + 1)
    return blocks


def _difference(config: PreTrainedConfig, *, document_mask: bool) -> str | None:
    """Return what differs from transformers' own model, or None."""
    torch.manual_seed(0)
    stock = stock_model(config, attention="eager")
    stock.eval()
    stock.loss_type = stock.loss_type or "ForCausalLM"  # the same as None, without a warning in each run
    with torch.no_grad():
        for weight in stock.parameters():
            noise = torch.randn_like(weight)
            weight.add_(noise, alpha=0.1)  # larger weights make differences visible
    # A copy of the configuration, because it contains the attention.
    ours = stock_model(copy.deepcopy(config), attention="causal_sdpa", is_random=False)
    ours.eval()
    ours.load_state_dict(stock.state_dict())
    make_pretraining(ours, vocab_size=VOCABULARY)
    length = min(LENGTH, config.max_position_embeddings)
    ids = torch.randint(1, VOCABULARY, (1, length))
    with torch.no_grad():
        expected = stock(input_ids=ids, labels=ids).loss
        hidden = ours.base_model(input_ids=ids, use_cache=False).last_hidden_state
        other_ids = ids.clone()
        other_ids[:, -1] ^= 1
        other_hidden = ours.base_model(input_ids=other_ids, use_cache=False).last_hidden_state
    if not torch.allclose(hidden[:, :-1], other_hidden[:, :-1], atol=1e-3):
        return "its attention is not causal"
    loss = ours(input_ids=ids[:, :-1], shift_labels=ids[:, 1:]).loss
    difference = abs(loss.item() - expected.item())
    if not difference <= LOSS_TOLERANCE:
        return f"its attention or its logits differ, so its loss is {expected:.4f} instead of {loss:.4f}"
    experts, _ = experts_of(config)
    module = sys.modules[type(stock).__module__]
    if experts and not hasattr(module, "load_balancing_loss_func"):
        return "transformers has no load-balancing loss for its experts"
    if document_mask and not _separates_documents(ours, ids, hidden):
        return "its layers mix documents, so --document_mask must be removed"
    loss.backward()
    for name, weight in ours.named_parameters():
        if weight.grad is None:
            return f"{name} gets no gradient"
    return None


@torch.no_grad()
def _separates_documents(model: PreTrainedModel, ids: Tensor, hidden: Tensor) -> bool:
    """Return whether a document mask hides other documents and nothing else.

    Args:
        ids: a row of token ids [1, T] without the id 0.
        hidden: the last hidden states of this row without a mask.
    """
    middle = ids.shape[1] // 2
    rows = torch.cat([ids, ids, ids.roll(1, dims=1)])
    rows[1:, middle:] = ids[:, middle:]
    rows[1:, middle] = 0
    mask = Documents(separator=0).attention(model, rows)
    whole, one, other = model.base_model(input_ids=rows, use_cache=False, **mask).last_hidden_state
    hides_other_documents = torch.allclose(one[middle:], other[middle:], atol=1e-3)
    hides_nothing_else = torch.allclose(whole, hidden[0], atol=1e-3)
    return hides_other_documents and hides_nothing_else

"""Attention kept inside a document, where a packed row holds several: what attention has to be told of a row's ids.

Only attention is kept inside. Positions stay those of the row, so that every position embedding goes on being trained.
"""

import dataclasses
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from gpt2_repro.errors import UserError


@dataclasses.dataclass(frozen=True)
class Documents:
    """How the documents of a row are told apart.

    Args:
        separator: the id that stands at every boundary, and nowhere else.
        behind: whether it ends a document; else it opens one.
    """

    separator: int
    behind: bool = False

    def starts(self, ids: Tensor) -> Tensor:
        """Where documents begin in `ids` [rows, T], of bool. A row's first position begins one, or what is left of it."""
        starts = ids == self.separator
        if self.behind:
            starts = starts.roll(1, dims=1)
        starts[:, 0] = True
        return starts

    def attention(self, model: PreTrainedModel, ids: Tensor) -> dict[str, Any]:
        """Arguments with which the model's forward keeps the attention of `ids` [rows, T] inside documents."""
        starts = self.starts(ids)
        if takes_lengths(model):
            return _lengths(starts)
        device = ids.device.type
        # One for all layers: of a mask of bool SDPA would make one for each, and keep it for the backward pass.
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else model.dtype
        number = starts.cumsum(1)
        seen = (number[:, :, None] == number[:, None, :]).tril()
        mask = torch.zeros(seen.shape, dtype=dtype, device=ids.device).masked_fill_(~seen, -torch.inf)
        return {"attention_mask": mask.unsqueeze(1)}


def documents_of(tokenizer: PreTrainedTokenizerBase, separator: str) -> Documents:
    """Those of rows in which the tokenizer's end-of-text id stands `before` or `after` each document.

    Raises UserError where the tokenizer does not say which that is.
    """
    if tokenizer.eos_token_id is None:
        raise UserError("The data's tokenizer has no end-of-text token. Leave out --document_mask, which needs it.")
    return Documents(tokenizer.eos_token_id, behind=separator == "after")


def takes_lengths(model: PreTrainedModel) -> bool:
    """Whether the model's attention is told the lengths of documents. Other ones get a mask."""
    return model.config._attn_implementation == "flash_attention_2"


def _lengths(starts: Tensor) -> dict[str, Any]:
    """For flash-attn's variable-length kernel, to which transformers hands all rows as one sequence.

    Not the position ids: with several rows transformers does not look for documents in them (_is_packed_sequence, 5.23).
    """
    # On a GPU the host waits here: it has to know how many documents there are.
    begins = starts.flatten().nonzero().squeeze(1).to(torch.int32)
    cumulative = torch.nn.functional.pad(begins, (0, 1), value=starts.numel())
    # Compiled once for any number of documents.
    torch._dynamo.mark_dynamic(cumulative, 0)
    # A bound, not the longest: that would be another number, and another graph, in each pass.
    longest = starts.shape[1]
    return {"cu_seq_lens_q": cumulative, "cu_seq_lens_k": cumulative, "max_length_q": longest, "max_length_k": longest}

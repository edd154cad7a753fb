"""Prevent attention between the documents of a row.

Only attention is limited. Positions count from the start of the row and are not reset at documents, so that every
position embedding is trained.
"""

import dataclasses
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from gpt2_repro.errors import UserError


@dataclasses.dataclass(frozen=True)
class Documents:
    """The rule that finds the documents in a row of token ids.

    Args:
        separator: the id at every document boundary. It occurs nowhere else.
        behind: whether the separator ends a document. If false, the separator starts a document.
    """

    separator: int
    behind: bool = False

    def starts(self, ids: Tensor) -> Tensor:
        """Return a bool tensor [rows, T] that is True where a document starts in `ids`.

        The first position of a row is always True, even if the row begins inside a document.
        """
        starts = ids == self.separator
        if self.behind:
            starts = starts.roll(1, dims=1)
        starts[:, 0] = True
        return starts

    def attention(self, model: PreTrainedModel, ids: Tensor) -> dict[str, Any]:
        """Return arguments of the model's forward that limit attention to documents.

        `ids` is [rows, T].
        """
        starts = self.starts(ids)
        if takes_lengths(model):
            return _lengths(starts)
        device = ids.device.type
        # All layers share this float mask. SDPA would convert a bool mask in each layer and keep it for backward.
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else model.dtype
        number = starts.cumsum(1)
        seen = (number[:, :, None] == number[:, None, :]).tril()
        mask = torch.zeros(seen.shape, dtype=dtype, device=ids.device).masked_fill_(~seen, -torch.inf)
        return {"attention_mask": mask.unsqueeze(1)}


def documents_of(tokenizer: PreTrainedTokenizerBase, separator: str) -> Documents:
    """Return the rule for documents that the tokenizer's end-of-text id separates.

    `separator` is "before" or "after": the place of that id relative to each document.

    Raises UserError if the tokenizer does not define this id.
    """
    if tokenizer.eos_token_id is None:
        raise UserError("The data's tokenizer has no end-of-text token. Remove --document_mask, which needs it.")
    return Documents(tokenizer.eos_token_id, behind=separator == "after")


def takes_lengths(model: PreTrainedModel) -> bool:
    """Return whether the model's attention takes the lengths of documents.

    All other attention implementations get a mask.
    """
    return model.config._attn_implementation == "flash_attention_2"


def _lengths(starts: Tensor) -> dict[str, Any]:
    """Return the arguments for flash-attn's variable-length kernel.

    transformers passes all rows to this kernel as one sequence. Passing position ids instead would not work, because
    transformers looks for documents in them only if there is one row (_is_packed_sequence, 5.23).
    """
    # A host sync on a GPU: the host needs the number of documents.
    begins = starts.flatten().nonzero().squeeze(1).to(torch.int32)
    cumulative = torch.nn.functional.pad(begins, (0, 1), value=starts.numel())
    # One graph serves any number of documents.
    torch._dynamo.mark_dynamic(cumulative, 0)
    # An upper bound. The longest document would be a different number, and need a new graph, in each pass.
    longest = starts.shape[1]
    return {"cu_seq_lens_q": cumulative, "cu_seq_lens_k": cumulative, "max_length_q": longest, "max_length_k": longest}

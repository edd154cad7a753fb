"""Prevent attention between the documents of a row.

Positions do not restart in each document, so that every position embedding is trained.
"""

import dataclasses
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils.generic import is_flash_attention_requested


@dataclasses.dataclass(frozen=True)
class Documents:
    """The rule that finds the documents in a row of token ids.

    Args:
        separator: the id at every document boundary and nowhere else.
        behind: whether the separator ends a document. If false, the separator starts a document.
    """

    separator: int
    behind: bool = False

    def starts(self, ids: Tensor) -> Tensor:
        """Return a bool tensor [rows, T]: whether a document starts at each of `ids`."""
        starts = ids == self.separator
        if self.behind:
            starts = starts.roll(1, dims=1)
        starts[:, 0] = True
        return starts

    def attention(self, model: PreTrainedModel, ids: Tensor) -> dict[str, Any]:
        """Return arguments for `model.forward` that mask other documents of `ids` [rows, T]."""
        starts = self.starts(ids)
        if is_flash_attention_requested(model.config):
            # Lengths instead of a mask, and not position ids: transformers (5.23, _is_packed_sequence) finds documents in
            # position ids only for a single row. With lengths, transformers passes all rows to the kernel as one
            # sequence. A host sync on a GPU: the host needs the number of documents.
            begins = starts.flatten().nonzero()
            begins = begins.squeeze(1).to(torch.int32)
            ends = torch.nn.functional.pad(begins, (0, 1), value=starts.numel())
            # One graph serves any number of documents.
            torch._dynamo.mark_dynamic(ends, 0)
            # An upper bound. The longest document would be a different number, and need a new graph, in each pass.
            longest = starts.shape[1]
            return {
                "cu_seq_lens_q": ends,
                "cu_seq_lens_k": ends,
                "max_length_q": longest,
                "max_length_k": longest,
            }
        device = ids.device.type
        # All layers share this float mask. SDPA would convert a bool mask in each layer and keep it for backward.
        dtype = model.dtype
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        number = starts.cumsum(1)
        seen = (number[:, :, None] == number[:, None, :]).tril()
        mask = torch.zeros(seen.shape, dtype=dtype, device=ids.device)
        mask.masked_fill_(~seen, -torch.inf)
        return {"attention_mask": mask.unsqueeze(1)}

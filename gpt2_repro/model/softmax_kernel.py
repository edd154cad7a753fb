"""The cross-entropy of logits and its gradient as a Triton kernel."""

import torch
import triton
import triton.language as tl
from torch import Tensor


# The fastest of 11 combinations on an H200 (benchmarks/RESULTS.md).
BLOCK = 2048
WARPS = 4


@triton.jit
def cross_entropy_kernel(
    logits_pointer, labels, losses, stride, vocab_size: tl.constexpr, padded_size: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    logits = logits_pointer + row * stride
    label = tl.load(labels + row)
    columns = tl.arange(0, BLOCK)
    # Each column of the block has its own maximum and sum, which are joined after the loop.
    largest = tl.full([BLOCK], -1e30, tl.float32)  # not -inf, whose difference to itself is NaN
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab_size, BLOCK):
        inside = start + columns < vocab_size
        x = tl.load(logits + start + columns, mask=inside, other=-float("inf"), eviction_policy="evict_last")
        x = x.to(tl.float32)
        larger = tl.maximum(largest, x)
        total = total * tl.exp(largest - larger) + tl.exp(x - larger)
        largest = larger
    top = tl.max(largest, 0)
    normalizer = tl.sum(total * tl.exp(largest - top), 0)
    is_target = label >= 0
    target_logit = tl.load(logits + tl.maximum(label, 0)).to(tl.float32)
    loss = tl.log(normalizer) - (target_logit - top)
    tl.store(losses + row, tl.where(is_target, loss, 0.0))
    scale = tl.where(is_target, 1.0 / normalizer, 0.0)
    tl.debug_barrier()  # all threads have read the label's logit
    for start in range(0, padded_size, BLOCK):
        ids = start + columns
        inside = ids < padded_size
        x = tl.load(logits + ids, mask=inside, other=0.0, eviction_policy="evict_first")
        x = x.to(tl.float32)
        probability = tl.exp(x - top) * scale
        grad_logit = tl.where(ids < vocab_size, probability, 0.0)
        grad_logit = tl.where(ids == label, grad_logit - 1.0, grad_logit)
        tl.store(logits + ids, grad_logit.to(logits_pointer.dtype.element_ty), mask=inside)


def replace_by_gradient(logits: Tensor, labels: Tensor, vocab_size: int) -> Tensor:
    """Replace logits [rows, padded vocabulary] by the gradient of the summed loss, and return the loss of each row.

    A row is read from the device's memory once, and again from its cache. The losses are fp32 nats [rows], 0 for
    labels below 0.
    """
    rows = len(logits)
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    cross_entropy_kernel[(rows,)](
        logits,
        labels,
        losses,
        logits.stride(0),
        vocab_size=vocab_size,
        padded_size=logits.shape[1],
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
    return losses

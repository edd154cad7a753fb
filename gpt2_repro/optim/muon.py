"""Combine the optimizers Muon and AdamW, with or without ZeRO."""

import functools
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from gpt2_repro.hardware import cpu_multiplies_bf16


NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # coefficients of the polynomial, as in torch.optim.Muon


def count_pieces(model: PreTrainedModel) -> dict[Tensor, int]:
    """Return how many matrices each 2-D weight of the transformer blocks contains.

    The number is 3 for the joint weight of query, key and value in GPT-2, otherwise 1.
    """
    lists = [part for part in model.base_model.modules() if isinstance(part, nn.ModuleList)]
    blocks = lists[0]
    pieces: dict[Tensor, int] = {}
    for name, weight in blocks.named_parameters():
        if weight.ndim != 2:
            continue  # Weights of experts are stacked in one tensor, which is not a matrix. AdamW updates it.
        # gpt_bigcode's weight of this name is (outputs, inputs), with a single head of keys and values.
        is_joint = name.endswith("c_attn.weight") and weight.shape[1] == 3 * weight.shape[0]
        pieces[weight] = 1
        if is_joint:
            pieces[weight] = 3
    return pieces


class MuonWithAdamW(torch.optim.AdamW):
    """Updates the weights in `pieces` with Muon, and all other weights with AdamW.

    Muon is by Jordan et al. 2024 (kellerjordan.github.io/posts/muon). Its updates are scaled to the size of AdamW's
    updates (Liu et al. 2025, arXiv:2502.16982), so Muon and AdamW use the same learning rate, decay and schedule.

    ZeRO-1 and ZeRO-2 replace the weights of a group by this rank's part of one flat tensor. Each rank then
    orthogonalizes only the matrices that overlap with its part.

    Args:
        params: parameter groups, each with a `weight_decay`.
        pieces: the weights that Muon updates, each with the number of matrices that it contains side by side.
        momentum: of Muon. Each step keeps this share of the average of the gradients.
        adamw: keyword arguments for AdamW. Of these, Muon uses only `lr`.
    """

    param_groups: list[dict[str, Any]]

    def __init__(
        self, params: Iterable[dict[str, Any]], *, pieces: Mapping[Tensor, int], momentum: float = 0.95, **adamw: Any
    ) -> None:
        self.momentum = momentum
        groups: list[dict[str, Any]] = []
        for group in params:
            own: list[Tensor] = []
            rest: list[Tensor] = []
            matrices: list[tuple[int, int, int]] = []  # rows, columns, number of matrices
            for weight in group["params"]:
                if weight in pieces:
                    own.append(weight)
                    rows, columns = weight.shape
                    matrices.append((rows, columns, pieces[weight]))
                else:
                    rest.append(weight)
            if own:
                groups.append(group | {"params": own, "by": "muon", "matrices": matrices})
            if rest:
                groups.append(group | {"params": rest, "by": "adamw", "fused": True})
        super().__init__(groups, **adamw)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Update all weights that have a gradient."""
        groups = self.param_groups
        self.param_groups = [group for group in groups if group["by"] != "muon"]
        super().step()
        self.param_groups = groups
        for group in groups:
            if group["by"] != "muon":
                continue
            is_sharded = group["params"][0].ndim == 1
            if is_sharded:
                updates = self._sharded_updates(group)
            else:
                updates = self._updates(group)
            self._step_muon(group, updates)

    def _updates(self, group: Mapping[str, Any]) -> list["_Update"]:
        """Return the updates of a group of complete weights."""
        updates: list[_Update] = []
        for weight, (_, _, count) in zip(group["params"], group["matrices"], strict=True):
            if weight.grad is not None:
                matrix = self._average(weight)
                updates.append(_Update(matrix, count, weight, own=matrix))
        return updates

    def _sharded_updates(self, group: Mapping[str, Any]) -> list["_Update"]:
        """Return the updates of the matrices that overlap with this rank's part of a flat tensor. A collective."""
        updates: list[_Update] = []
        [part] = group["params"]
        if part.grad is None:
            return updates
        average = self._average(part)
        average = average.to(product_dtype(part.device))
        size = len(average)
        part_start = dist.get_rank() * size
        part_end = part_start + size
        total_size = dist.get_world_size() * size
        averages = average.new_empty(total_size)
        dist.all_gather_into_tensor(averages, average)
        end = 0
        for rows, columns, count in group["matrices"]:
            start = end
            end += rows * columns
            first = max(start, part_start)
            last = min(end, part_end)
            if first < last:
                matrix = averages[start:end].view(rows, columns)
                weight = part[first - part_start : last - part_start]
                own = averages[first:last]
                updates.append(_Update(matrix, count, weight, own))
        return updates

    def _average(self, weight: Tensor) -> Tensor:
        """Return Nesterov's average of the gradients of `weight`."""
        state = self.state[weight]
        if "exp_avg" not in state:
            # AdamW and DeepSpeed's conversion of checkpoints expect the state of Adam.
            state["step"] = torch.zeros(())
            state["exp_avg"] = torch.zeros_like(weight)
            if weight.ndim == 1:
                state["exp_avg_sq"] = torch.zeros_like(weight)
        state["step"] += 1
        average: Tensor = state["exp_avg"]
        average.lerp_(weight.grad, 1 - self.momentum)
        return weight.grad.lerp(average, self.momentum)

    def _step_muon(self, group: Mapping[str, Any], updates: list["_Update"]) -> None:
        # One batch of products for all matrices of a shape. torch 2.13 orthogonalizes each matrix alone, with 15
        # products: 1,080 for the 72 matrices of GPT-2 124M.
        by_shape: dict[torch.Size, list[Tensor]] = {}
        for update in updates:
            for matrix in update.matrix.chunk(update.pieces, dim=-1):
                by_shape.setdefault(matrix.shape, []).append(matrix)
        for matrices in by_shape.values():
            results = orthogonalize(torch.stack(matrices))
            for matrix, result in zip(matrices, results, strict=True):
                matrix.copy_(result)
        rate = group["lr"]
        decay = rate * group["weight_decay"]
        for update in updates:
            rows, columns = update.matrix.shape
            longest_side = max(rows, columns // update.pieces)
            size = 0.2 * math.sqrt(longest_side)  # of AdamW's updates
            update.weight.mul_(1 - decay)
            update.weight.add_(update.own, alpha=-rate * size)


class _Update(NamedTuple):
    """The data for one Muon update of a weight.

    Args:
        matrix: the gradient of the complete weight, averaged over steps. The orthogonalized update overwrites it.
        pieces: number of matrices side by side in `matrix`.
        weight: the part of the weight that this rank updates.
        own: the part of `matrix` that belongs to `weight`.
    """

    matrix: Tensor
    pieces: int
    weight: Tensor
    own: Tensor


@functools.cache
def product_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype in which Muon multiplies matrices."""
    # Without bf16 instructions, a step of the demo took 6.6 s with products in bf16 and 0.9 s in fp32.
    if device.type == "cpu" and not cpu_multiplies_bf16():
        return torch.float32
    return torch.bfloat16


def orthogonalize(matrices: Tensor) -> Tensor:
    """Return each matrix with its singular values replaced by values near 1.

    The singular vectors do not change. This is the Newton-Schulz iteration of torch.optim.Muon, for a batch of shape
    [matrices, m, n].
    """
    a, b, c = NEWTON_SCHULZ
    is_tall = matrices.shape[1] > matrices.shape[2]
    if is_tall:
        matrices = matrices.mT
    result = matrices.to(product_dtype(matrices.device))
    norms = result.norm(dim=(1, 2), keepdim=True)
    result = result / norms.clamp(min=1e-7)
    for _ in range(5):
        gram = result @ result.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)  # b * gram + c * gram @ gram
        result = torch.baddbmm(result, polynomial, result, beta=a)  # a * result + polynomial @ result
    if is_tall:
        return result.mT
    return result

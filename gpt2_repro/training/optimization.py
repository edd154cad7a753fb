"""Build the learning-rate schedule of llm.c, and combine Muon with AdamW."""

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, assert_never

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel

from gpt2_repro.training.arguments import MUON, PretrainingArguments, Schedule


def learning_rate_factor(
    step: int,
    *,
    warmup_steps: int,
    max_steps: int,
    final_factor: float = 0.0,
    extensions: Sequence[Sequence[int]] = (),
    kind: Schedule = "cosine",
    decay_fraction: float = 0.2,
) -> float:
    """Return the learning rate of an update as a fraction of the peak.

    The formulas are from llm.c (llmc/schedulers.h).

    Args:
        step: the number of the update, counted from 0.
        max_steps: the step at which the decay ends, without the steps added by extensions.
        final_factor: the learning rate at the end of the decay, as a fraction of the peak.
        extensions: ranges of steps, as [from, to], that were added to the run. In each range the rate rises to the
            peak and decays again (Ibrahim et al. 2024, arXiv:2403.08763).
        decay_fraction: the length of the decay as a fraction of all steps, if `kind` is warmup_stable_decay.
    """
    before, begin, end, rise = 0.0, 0, max_steps, warmup_steps

    def factor(at: int) -> float:
        if at - begin < rise:
            # The first update has a rate above 0.
            return before + (1 - before) * (at - begin + 1) / rise
        if kind == "constant":
            return 1.0
        if kind == "warmup_stable_decay":
            falling = round(decay_fraction * (end - begin))
            fallen = min(1.0, max(0, at - (end - falling)) / max(1, falling))
            return final_factor + (1.0 - math.sqrt(fallen)) * (1.0 - final_factor)
        if kind == "cosine":
            decay = min(1.0, (at - begin - rise) / max(1, end - begin - rise))
            return final_factor + 0.5 * (1.0 + math.cos(math.pi * decay)) * (1.0 - final_factor)
        assert_never(kind)

    for first, last in extensions:
        if step >= first:
            before, begin, end, rise = factor(first), first, last, min(warmup_steps, (last - first) // 2)
    return factor(step)


def build_schedule(optimizer: Any, args: PretrainingArguments, run_identity: Mapping[str, Any]) -> LambdaLR:
    """Return the learning-rate schedule of a run, including its extensions.

    Args:
        run_identity: provides `extensions`, and `max_steps` without the steps added by extensions.
    """
    factor = functools.partial(
        learning_rate_factor,
        warmup_steps=int(args.warmup_steps),
        max_steps=run_identity["max_steps"],
        final_factor=args.final_learning_rate_fraction,
        extensions=run_identity["extensions"],
        kind=args.lr_scheduler_type,
        decay_fraction=args.decay_fraction,
    )
    return LambdaLR(optimizer, factor)


def follow(schedule: LambdaLR, learning_rate: float) -> None:
    """Set the learning rate of the next update from `schedule`.

    Args:
        learning_rate: the new peak of the schedule.
    """
    # A checkpoint restores the rate and the peak of the save. The recipe's peak may have changed since then.
    schedule.base_lrs = [learning_rate for _ in schedule.base_lrs]
    for group, factor in zip(schedule.optimizer.param_groups, schedule.lr_lambdas, strict=True):
        group["lr"] = learning_rate * factor(schedule.last_epoch)
    schedule._last_lr = [group["lr"] for group in schedule.optimizer.param_groups]


def muon_for(model: PreTrainedModel, args: PretrainingArguments) -> tuple[type, dict[str, Any]] | None:
    """Return Trainer's `optimizer_cls_and_kwargs` for Muon, or None without Muon."""
    if args.optim != MUON:
        return None
    options = {"lr": args.learning_rate, "betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
    return MuonWithAdamW, {"pieces": count_pieces(model), **options}


def count_pieces(model: PreTrainedModel) -> dict[Tensor, int]:
    """Return how many matrices each 2-D weight of the transformer blocks contains.

    The number is 3 for the joint weight of query, key and value in GPT-2, otherwise 1.
    """
    blocks = next(part for part in model.base_model.children() if isinstance(part, nn.ModuleList))
    # Weights of experts are stacked in one tensor. Such a tensor is not a matrix, so AdamW updates it.
    matrices = [(name, weight) for name, weight in blocks.named_parameters() if weight.ndim == 2]
    return {weight: 3 if name.endswith("c_attn.weight") else 1 for name, weight in matrices}


class _BatchedMuon(torch.optim.Muon):
    """torch's Muon, with one batch of matrix products for all matrices of a shape."""

    # torch 2.13 orthogonalizes each matrix alone, with 15 products: 1,080 for the 72 matrices of GPT-2 124M.

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            weights: list[Tensor] = []
            gradients: list[Tensor] = []
            momenta: list[Tensor] = []
            self._init_group(group, weights, gradients, momenta)
            by_shape: dict[torch.Size, list[int]] = {}
            for number, weight in enumerate(weights):
                momenta[number].lerp_(gradients[number], 1 - group["momentum"])
                by_shape.setdefault(weight.shape, []).append(number)
            for shape, numbers in by_shape.items():
                # Nesterov momentum
                stacked = torch.stack([gradients[n].lerp(momenta[n], group["momentum"]) for n in numbers])
                rate = 0.2 * group["lr"] * math.sqrt(max(shape))  # match_rms_adamw
                for n, update in zip(numbers, orthogonalize(stacked, group), strict=True):
                    weights[n].mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-rate)


def orthogonalize(matrices: Tensor, group: Mapping[str, Any]) -> Tensor:
    """Return matrices with the same singular vectors and singular values near 1.

    The Newton-Schulz iteration of torch.optim.Muon in bf16, for a batch of shape [matrices, m, n].
    """
    a, b, c = group["ns_coefficients"]
    is_tall = matrices.shape[1] > matrices.shape[2]
    result = (matrices.mT if is_tall else matrices).bfloat16()
    result = result / result.norm(dim=(1, 2), keepdim=True).clamp(min=group["eps"])
    for _ in range(group["ns_steps"]):
        gram = result @ result.mT
        result = torch.baddbmm(result, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), result, beta=a)
    return result.mT if is_tall else result


class MuonWithAdamW(torch.optim.Optimizer):
    """Updates the weights in `pieces` with Muon, and all other weights with AdamW.

    Muon is by Jordan et al. 2024 (kellerjordan.github.io/posts/muon).

    Args:
        params: parameter groups, each with a `weight_decay`.
        pieces: the weights that Muon updates, each with the number of matrices that it contains side by side.
        lr: the learning rate of both optimizers.
        adamw: additional keyword arguments for AdamW.
    """

    def __init__(
        self, params: Iterable[dict[str, Any]], *, pieces: Mapping[Tensor, int], lr: float, **adamw: Any
    ) -> None:
        groups = []
        for group in params:
            own = [weight for weight in group["params"] if weight in pieces]
            rest = [weight for weight in group["params"] if weight not in pieces]
            groups += [group | {"params": part, "by": by} for part, by in ((own, MUON), (rest, "adamw")) if part]
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0})
        self._split = {
            weight: [nn.Parameter(part) for part in weight.detach().chunk(count, dim=-1)]
            for weight, count in pieces.items()
        }
        inner: dict[str, list[dict[str, Any]]] = {MUON: [], "adamw": []}
        for group in self.param_groups:
            weights = [part for weight in group["params"] for part in self._split.get(weight, [weight])]
            inner[group["by"]].append({"params": weights, "lr": lr, "weight_decay": group["weight_decay"]})
        self._inner: dict[str, torch.optim.Optimizer] = {
            # Updates are scaled to the size of AdamW's (Liu et al. 2025, arXiv:2502.16982), so both optimizers use
            # the same learning rate, decay and schedule.
            MUON: _BatchedMuon(inner[MUON], lr=lr, adjust_lr_fn="match_rms_adamw"),
            "adamw": torch.optim.AdamW(inner["adamw"], lr=lr, fused=True, **adamw),
        }

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Update all weights that have a gradient."""
        for weight, parts in self._split.items():
            gradients = [None] * len(parts) if weight.grad is None else weight.grad.chunk(len(parts), dim=-1)
            # The weight may have moved since __init__: to a device or into a buffer of the launcher.
            values_of_parts = weight.detach().chunk(len(parts), dim=-1)
            for part, values, gradient in zip(parts, values_of_parts, gradients, strict=True):
                part.data, part.grad = values, gradient
        for by, optimizer in self._inner.items():
            groups = [group for group in self.param_groups if group["by"] == by]
            for inner, group in zip(optimizer.param_groups, groups, strict=True):
                inner |= {"lr": group["lr"], "weight_decay": group["weight_decay"]}
            optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the states of Muon and AdamW, and the parameter groups."""
        state = {by: optimizer.state_dict() for by, optimizer in self._inner.items()}
        return {"state": state, "param_groups": super().state_dict()["param_groups"]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the states of Muon and AdamW and the parameter groups."""
        for by, optimizer in self._inner.items():
            optimizer.load_state_dict(state_dict["state"][by])
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group |= {key: value for key, value in saved.items() if key != "params"}

"""Muon updates the matrices of the blocks, and AdamW all other weights."""

import json

import pytest
import torch
from torch import nn
from transformers import GPT2LMHeadModel, GPTBigCodeConfig, GPTBigCodeForCausalLM

from gpt2_repro.optim import muon as module
from gpt2_repro.optim.muon import MuonWithAdamW, count_pieces, orthogonalize
from tests.optim.simulation import Ranks, draw_gradients, groups_of, small_model


RATES = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8}


def optimizer_of(model: GPT2LMHeadModel, **options: float) -> MuonWithAdamW:
    return MuonWithAdamW(groups_of(model), pieces=count_pieces(model), **RATES, **options)


def test_only_gpt2_s_joint_weight_has_three_pieces() -> None:
    """The weight of this name in GPTBigCode has a single head of keys and values, and is transposed."""
    assert set(count_pieces(small_model()).values()) == {1, 3}
    config = GPTBigCodeConfig(n_layer=1, n_head=4, n_embd=32, vocab_size=64, n_positions=16)
    assert set(count_pieces(GPTBigCodeForCausalLM(config)).values()) == {1}


@pytest.mark.parametrize("momentum", [0.95, 0.8])
def test_updates_match_torchs_optimizers(momentum: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "product_dtype", lambda device: torch.bfloat16)  # torch's Muon
    ours, theirs = small_model(), small_model()
    optimizer = optimizer_of(ours, momentum=momentum)
    for weight in ours.parameters():  # weights may have moved to a device or into a buffer of the launcher
        weight.data = weight.data.clone()
    # The reference stores query, key and value as separate matrices.
    own: dict[str, list[nn.Parameter]] = {}
    for name, weight in theirs.named_parameters():
        if ".h." in name and weight.ndim == 2:
            parts = weight.detach().split(16, dim=1) if "c_attn" in name else [weight.detach()]
            own[name] = [nn.Parameter(part.clone()) for part in parts]
    matrices = [part for parts in own.values() for part in parts]
    muon = torch.optim.Muon(matrices, lr=3e-3, weight_decay=0.1, momentum=momentum, adjust_lr_fn="match_rms_adamw")
    outside = {name: weight for name, weight in theirs.named_parameters() if name not in own}
    decayed = [{"params": [weight], "weight_decay": 0.1 if weight.ndim == 2 else 0.0} for weight in outside.values()]
    adamw = torch.optim.AdamW(decayed, **RATES)
    for step, rate in enumerate((3e-3, 1e-3, 0.0)):
        draw_gradients(ours, step)
        for name, weight in ours.named_parameters():
            parts = own.get(name) or [outside[name]]
            for part, gradient in zip(parts, weight.grad.chunk(len(parts), dim=-1), strict=True):
                part.grad = gradient.clone()
        for group in (*optimizer.param_groups, *muon.param_groups, *adamw.param_groups):
            group["lr"] = rate
        for each in (optimizer, muon, adamw):
            each.step()
    for name, weight in ours.named_parameters():
        torch.testing.assert_close(weight, torch.cat(own[name], dim=1) if name in own else outside[name])


def test_skipped_update_changes_nothing() -> None:
    model = small_model()
    optimizer = optimizer_of(model)

    def state() -> str:
        everything = [list(model.parameters()), optimizer.state_dict()]
        return json.dumps(everything, default=lambda tensor: tensor.tolist())

    draw_gradients(model, 0)
    optimizer.step()
    before = state()
    optimizer.zero_grad()
    optimizer.step()
    assert state() == before


@pytest.mark.parametrize("number", [1, 2, 4])
def test_each_rank_orthogonalizes_its_part_of_the_matrices(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """20 steps on parts of a flat tensor equal 20 steps on whole weights.

    Under ZeRO-1 and 2, a rank has a part of all weights of a group, cut anywhere and padded at the end.
    """
    monkeypatch.setattr(module, "product_dtype", lambda device: torch.float32)  # bf16 would hide differences
    ranks, work = Ranks(number, module, monkeypatch), [0] * number

    def counted(batch: torch.Tensor) -> torch.Tensor:
        if hasattr(ranks.here, "rank"):  # otherwise the optimizer of the whole weights
            work[ranks.rank()] += batch.numel()
        return orthogonalize(batch)

    monkeypatch.setattr(module, "orthogonalize", counted)
    model = small_model()
    whole, optimizers = optimizer_of(model), [optimizer_of(small_model()) for _ in range(number)]
    [group] = [group for group in whole.param_groups if group["by"] == "muon"]
    flat = nn.utils.parameters_to_vector(group["params"]).detach()
    padding = flat.new_zeros(-len(flat) % (2 * number))
    parts = [nn.Parameter(part.clone()) for part in torch.cat([flat, padding]).chunk(number)]
    for optimizer, part in zip(optimizers, parts, strict=True):
        optimizer.param_groups[:] = [own for own in optimizer.param_groups if own["by"] == "muon"]
        optimizer.param_groups[0]["params"] = [part]
    for step in range(20):
        draw_gradients(model, step)
        gradients = torch.cat([weight.grad.flatten() for weight in group["params"]] + [padding])
        for part, gradient in zip(parts, gradients.chunk(number), strict=True):
            part.grad = gradient.clone()
        ranks.step(optimizers)
        whole.step()
    expected = nn.utils.parameters_to_vector(group["params"]).detach()
    assert (expected - flat).abs().max() > 0.01  # the weights have moved
    torch.testing.assert_close(torch.cat(parts).detach()[: len(flat)], expected, rtol=0, atol=1e-5)
    largest = 4 * 16 * 16
    assert max(work) <= 20 * (len(flat) / number + 2 * largest)  # neighbours share at most two matrices

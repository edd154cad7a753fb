"""Muon updates the matrices of the blocks, and AdamW all other weights."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from gpt2_repro.training.optimization import MuonWithAdamW, count_pieces


RATES = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8}


def small_model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    special = {"bos_token_id": None, "eos_token_id": None}
    return GPT2LMHeadModel(GPT2Config(vocab_size=40, n_positions=8, n_embd=16, n_layer=2, n_head=2, **special))


def groups_of(weights: list[nn.Parameter]) -> list[dict]:
    """Return the two parameter groups that Trainer creates: with and without decay."""
    matrices = {"params": [weight for weight in weights if weight.ndim == 2], "weight_decay": 0.1}
    return [matrices, {"params": [weight for weight in weights if weight.ndim != 2], "weight_decay": 0.0}]


def optimizer_of(model: GPT2LMHeadModel) -> MuonWithAdamW:
    return MuonWithAdamW(groups_of(list(model.parameters())), pieces=count_pieces(model), **RATES)


def draw_gradients(model: nn.Module, seed: int) -> None:
    torch.manual_seed(seed)
    for weight in model.parameters():
        weight.grad = torch.randn_like(weight)


def test_updates_match_torchs_optimizers() -> None:
    ours, theirs = small_model(), small_model()
    optimizer = optimizer_of(ours)
    for weight in ours.parameters():  # weights may have moved to a device or into a buffer of the launcher
        weight.data = weight.data.clone()
    # The reference stores query, key and value as separate matrices.
    own: dict[str, list[nn.Parameter]] = {}
    for name, weight in theirs.named_parameters():
        if ".h." in name and weight.ndim == 2:
            parts = weight.detach().split(16, dim=1) if "c_attn" in name else [weight.detach()]
            own[name] = [nn.Parameter(part.clone()) for part in parts]
    matrices = [part for parts in own.values() for part in parts]
    muon = torch.optim.Muon(matrices, lr=3e-3, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    outside = {name: weight for name, weight in theirs.named_parameters() if name not in own}
    adamw = torch.optim.AdamW(groups_of(list(outside.values())), **RATES)
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


@pytest.mark.slow
def test_muon_run_resumes_and_matches_on_two_processes(train, events, tmp_path: Path) -> None:
    options = ("--optim", "muon", "--lr_scheduler_type", "warmup_stable_decay", "--decay_fraction", 0.5)
    options += ("--per_device_train_batch_size", 4)
    straight = train(tmp_path / "straight", *options)
    resumed = train(tmp_path / "resumed", *options, "--stop_at_step", 3)
    train(resumed, *options)
    finals = [load_file(run / "final" / "model.safetensors") for run in (straight, resumed)]
    assert all(torch.equal(weight, finals[1][name]) for name, weight in finals[0].items())
    two = train(tmp_path / "two", *options, launcher=("torchrun", 2))
    losses = [[event["loss"] for event in events(run) if "loss" in event] for run in (straight, two)]
    assert losses[1] == pytest.approx(losses[0], abs=2e-3)  # Muon's products are in bf16
    assert json.loads((two / "environment.json").read_text())["engine"]["optimizer"] == "MuonWithAdamW"
    rates = [event["learning_rate"] for event in events(straight) if "loss" in event]
    assert rates[3] == 1e-2 and rates[-1] == pytest.approx(1e-2 * (1 - 0.75**0.5))  # the last of four steps of decay

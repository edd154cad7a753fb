"""train.py logs the same losses as an independent loop in plain PyTorch."""

from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import load_from_disk
from safetensors.torch import load_file
from transformers import GPT2Config, GPT2LMHeadModel

from tests.reference import logits
from tests.reference import train as train_by_hand


STEPS, WARMUP, PEAK, CLIP = 20, 5, 1e-2, 0.6


@pytest.fixture
def start(tmp_path: Path) -> Path:
    """Return a checkpoint with random weights, biases and LayerNorm gains."""
    torch.manual_seed(5)
    config = GPT2Config(vocab_size=300, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(tmp_path / "start")
    return tmp_path / "start"


def test_every_step_equals_a_plain_loop(start: Path, tiny_data: Path, train, events, tmp_path: Path) -> None:
    rows = torch.tensor(np.asarray(load_from_disk(str(tiny_data / "train")).with_format("numpy")["input_ids"][:]))
    weights = load_file(start / "model.safetensors")
    settings = {"heads": 2, "peak": PEAK, "warmup": WARMUP, "clip": CLIP, "decay": 0.1}
    expected = list(train_by_hand(weights, rows[: STEPS * 8].view(STEPS, 8, -1), **settings))
    # Some steps are clipped and others are not.
    norms = [step["grad_norm"] for step in expected]
    assert min(norms) < CLIP < max(norms)
    options = ("--init_from", start, "--train_sampling_strategy", "sequential", "--max_steps", STEPS)
    options += ("--per_device_train_batch_size", 4, "--learning_rate", PEAK, "--warmup_steps", WARMUP)
    run = train(tmp_path / "run", *options, "--max_grad_norm", CLIP, "--eval_strategy", "no")
    logged = [event for event in events(run) if "loss" in event]
    assert len(logged) == STEPS
    # Without decay or clipping, with one more warm-up step or 0.98 of the rate, losses differ by more than 1e-3.
    for ours, theirs in zip(logged, expected, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-4), ours["step"]
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3), ours["step"]
        assert ours["learning_rate"] == pytest.approx(theirs["learning_rate"], rel=1e-9), ours["step"]
    # Matrices have weight decay. Gains and biases do not.
    optimizer = torch.load(run / f"checkpoint-{STEPS}" / "optimizer.pt")
    for group, decay, dimensions in zip(optimizer["param_groups"], (0.1, 0.0), (2, 1), strict=True):
        assert group["weight_decay"] == decay
        assert {optimizer["state"][number]["exp_avg"].dim() for number in group["params"]} == {dimensions}
    final = load_file(run / "final" / "model.safetensors")
    # Compare outputs, not weights: the gradient of a key bias is only rounding error, but Adam makes full steps of it.
    with torch.no_grad():
        ours, theirs = (logits(each, rows[:4, :-1], 2) for each in (final, weights))
    assert torch.allclose(ours, theirs, atol=1e-3)

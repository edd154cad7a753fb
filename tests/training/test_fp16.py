"""Runs in fp16 scale the loss, skip overflows and resume exactly. fp16_train.py allows this on a CPU."""

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gpt2_repro.errors import Diverged, UserError
from gpt2_repro.hardware import choose_precision
from gpt2_repro.model.pretraining import chunked_cross_entropy
from gpt2_repro.training.guard import UpdateGuard
from tests.faults.runs import results


LAUNCHERS = [("python",), ("ddp", 2), ("launch", 2)]
Trained = Callable[..., Path]


@pytest.fixture
def train_fp16(type_warm, tiny_recipe: Path) -> Trained:
    """Return a function that trains the tiny recipe in fp16."""

    def run(output: Path, *options: object, launcher: tuple[object, ...], **environment: str) -> Path:
        words = ("--output_dir", output, "--precision", "fp16", "--per_device_train_batch_size", 4, *options)
        done = type_warm(*launcher, "tests/training/fp16_train.py", tiny_recipe, *words, **environment)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        return output

    return run


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_losses_are_those_of_fp32(launcher, train_fp16, train, events, tmp_path: Path) -> None:
    options = ("--max_steps", 50)
    half = train_fp16(tmp_path / "half", *options, launcher=launcher)
    whole = train(tmp_path / "whole", *options, "--per_device_train_batch_size", 4, launcher=launcher)
    for mine, theirs in zip(events(half), events(whole), strict=True):
        for key in ("loss", "eval_loss"):
            assert mine.get(key) == pytest.approx(theirs.get(key), abs=1e-2)
    assert events(half)[1]["loss_scale"] == 2**16
    engine = json.loads((half / "environment.json").read_text(encoding="utf-8"))["engine"]
    assert engine["matrix_products"] == "float16" and engine["master_weights"] == "float32"


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_an_overflow_is_skipped_and_a_resume_is_exact(launcher, train_fp16, events, tmp_path: Path) -> None:
    fault = {"launcher": launcher, "OVERFLOW_AT": "3"}  # on one rank
    straight = train_fp16(tmp_path / "straight", **fault)
    assert [event["loss_scale"] for event in events(straight) if "loss" in event] == [2**16] * 2 + [2**15] * 6
    assert sum("update_skipped" in event for event in events(straight)) == 1
    run = tmp_path / "run"
    train_fp16(run, "--stop_at_step", 4, **fault)
    train_fp16(run, **fault)
    assert results(run) == results(straight)
    assert [event["loss_scale"] for event in events(run) if "loss" in event] == [2**16] * 2 + [2**15] * 6


def test_only_overflows_at_the_smallest_scale_end_a_run(caplog: pytest.LogCaptureFixture) -> None:
    scale = 2.0**16
    guard = UpdateGuard(lambda step, event: None)
    guard.attach(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]), loss_scale=lambda: scale)
    with caplog.at_level(logging.WARNING):
        for step in range(1, 16):
            scale /= 2
            guard.after_step(step, passed_over=True)
    assert guard.total == 15 and "loss scale 2)" in caplog.text
    scale = 1.0
    with pytest.raises(Diverged, match="smallest loss scale"):
        guard.after_step(16, passed_over=True)


def test_sums_of_gradients_beyond_the_range_of_fp16_are_scaled_first() -> None:
    """Each of 4,096 tokens has the same target, so the sum of the head's gradients exceeds 65,504."""
    torch.manual_seed(0)
    hidden = torch.full((4096, 8), 30.0, dtype=torch.float16, requires_grad=True)
    weight = torch.zeros(64, 8, dtype=torch.float16, requires_grad=True)
    labels = torch.zeros(4096, dtype=torch.long)
    (chunked_cross_entropy(hidden, weight, labels, vocab_size=64) / 4096).backward()
    assert weight.grad is not None and weight.grad[0] == pytest.approx(torch.full((8,), -30 * 63 / 64), rel=1e-2)


# The precision on a GPU with and without bf16, and on a CPU with and without bf16. None: an error.
PRECISIONS = {"auto": ("bf16", "fp16", "bf16", "fp32"), "fp16": ("fp16", "fp16", "fp32", "fp32")}
PRECISIONS |= {"bf16": ("bf16", None, "bf16", "fp32"), "fp32": ("fp32",) * 4}


@pytest.mark.parametrize("asked", PRECISIONS)
def test_the_precision_is_what_the_device_computes_fast(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    devices = ((False, True), (False, False), (True, True), (True, False))
    for (cpu, native), expected in zip(devices, PRECISIONS[asked], strict=True):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda native=native, **options: native)
        monkeypatch.setattr("gpt2_repro.hardware.cpu_multiplies_bf16", lambda native=native: native)
        if expected:
            assert choose_precision(asked, use_cpu=cpu, accept_any_hardware=False)[0] == expected
        else:
            with pytest.raises(UserError, match="Tesla T4 does not support bf16. Pass --precision fp16"):
                choose_precision(asked, use_cpu=cpu, accept_any_hardware=False)
            assert choose_precision(asked, use_cpu=cpu, accept_any_hardware=True)[0] == "fp32"

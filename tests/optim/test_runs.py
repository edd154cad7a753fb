"""Runs with Muon or averaged weights agree under all launchers and resume."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.optim.simulation import average_of


pytestmark = pytest.mark.slow
OPTIONS = ("--accept_any_hardware", "true", "--per_device_train_batch_size")


def losses(events: list[dict]) -> list[float]:
    return [event["loss"] for event in events if "loss" in event]


# Muon's products are in bf16.
@pytest.mark.parametrize(
    ("optim", "processes", "tolerance"), [("adamw_torch_fused", 4, 1e-5), ("muon", 1, 2e-3), ("muon", 4, 2e-3)]
)
def test_runs_agree_and_resume_on_another_number_of_processes(
    train, events, optim: str, processes: int, tolerance: float, tmp_path: Path
) -> None:
    options = ("--optim", optim, "--learning_rate", 6e-3, *OPTIONS)
    straight = train(tmp_path / "straight", *options, 8)
    run = train(tmp_path / "resumed", *options, 4, "--stop_at_step", 4, launcher=("launch", 2))
    train(run, *options, 8 // processes, launcher=("launch", processes))
    ddp = train(tmp_path / "ddp", *options, 4, launcher=("torchrun", 2))
    expected = losses(events(straight))
    assert len(expected) == 8
    assert all(losses(events(other)) == pytest.approx(expected, abs=tolerance) for other in (run, ddp))


def test_a_muon_run_resumes_exactly_with_its_schedule(train, events, tmp_path: Path) -> None:
    options = ("--optim", "muon", "--lr_scheduler_type", "warmup_stable_decay", "--decay_fraction", 0.5, *OPTIONS, 4)
    straight = train(tmp_path / "straight", *options)
    resumed = train(tmp_path / "resumed", *options, "--stop_at_step", 3)
    train(resumed, *options)
    finals = [load_file(run / "final" / "model.safetensors") for run in (straight, resumed)]
    assert all(torch.equal(weight, finals[1][name]) for name, weight in finals[0].items())
    environment = json.loads((straight / "environment.json").read_text(encoding="utf-8"))
    assert environment["engine"]["optimizer"] == "MuonWithAdamW"
    rates = [event["learning_rate"] for event in events(straight) if "loss" in event]
    assert rates[3] == 1e-2 and rates[-1] == pytest.approx(1e-2 * (1 - 0.75**0.5))  # the last of four steps of decay


def test_final_is_the_average_under_all_launchers_and_after_a_resume(train, events, tmp_path: Path) -> None:
    options = ("--ema_steps", 3, "--eval_steps", 4, *OPTIONS)
    kept = ("--save_steps", 1, "--keep_checkpoints", 0)
    straight = train(tmp_path / "straight", *options, 8, *kept)
    saved = [load_file(straight / f"checkpoint-{step}" / "model.safetensors") for step in range(1, 9)]
    final = load_file(straight / "final" / "model.safetensors")
    for name, weight in final.items():
        rows = [of[name][: len(weight)] for of in saved]  # without the padding of the vocabulary
        torch.testing.assert_close(weight, average_of(rows, 3), rtol=0, atol=1e-6)
    validations = {event["step"]: event for event in events(straight) if "eval_loss" in event}
    assert "eval_EMA_loss" not in validations[0] and validations[8]["eval_EMA_loss"] != validations[8]["eval_loss"]

    resumed = train(tmp_path / "resumed", *options, 4, "--stop_at_step", 4, launcher=("launch", 2))
    train(resumed, *options, 4, launcher=("launch", 2))
    ddp = train(tmp_path / "ddp", *options, 4, launcher=("torchrun", 2))
    for run in (resumed, ddp):
        others = {event["step"]: event for event in events(run) if "eval_loss" in event}
        for step in (4, 8):
            assert others[step]["eval_EMA_loss"] == pytest.approx(validations[step]["eval_EMA_loss"], abs=1e-5)
        for name, weight in load_file(run / "final" / "model.safetensors").items():
            torch.testing.assert_close(weight, final[name], rtol=0, atol=1e-4)

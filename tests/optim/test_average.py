"""The average of the weights is right, is resumed, and becomes the final model."""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from gpt2_repro.optim.average import WeightAverage
from gpt2_repro.optim.mars import MarsAdamW
from gpt2_repro.optim.muon import MuonWithAdamW, count_pieces
from tests.optim.simulation import draw_gradients, groups_of, small_model


def average_of(values: Sequence[Tensor], steps: int) -> Tensor:
    """Return the mean of the first values, moved by 1 / steps to each later value."""
    average = torch.stack([value.double() for value in values[:steps]]).mean(0)
    for value in values[steps:]:
        average = (1 - 1 / steps) * average + value.double() / steps
    return average.float()


OPTIMIZERS: dict[str, Callable] = {
    "adamw": lambda model: torch.optim.AdamW(groups_of(model), lr=1e-2, fused=True),
    "mars": lambda model: MarsAdamW(groups_of(model), lr=1e-2),
    "muon": lambda model: MuonWithAdamW(groups_of(model), pieces=count_pieces(model), lr=1e-2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_average_equals_its_definition(name: str) -> None:
    model = small_model()
    optimizer, average = OPTIMIZERS[name](model), WeightAverage(4)
    average.attach(optimizer, None)
    seen: list[list[Tensor]] = []
    for step in range(10):
        assert average.exists == (step > 0)
        draw_gradients(model, step)
        optimizer.step()
        average.on_optimizer_step(None, SimpleNamespace(global_step=step), None)
        seen.append([weight.detach().clone() for weight in model.parameters()])
    with average.applied():
        for number, weight in enumerate(model.parameters()):
            torch.testing.assert_close(weight.detach(), average_of([of[number] for of in seen], 4))
    assert all(map(torch.equal, model.parameters(), seen[-1]))
    # A checkpoint stores it.
    assert all("average" in state for state in optimizer.state_dict()["state"].values())


@pytest.mark.slow
def test_final_is_the_average_under_all_launchers_and_after_a_resume(train, events, tmp_path: Path) -> None:
    options = ("--ema_steps", 3, "--accept_any_hardware", "true", "--eval_steps", 4)
    options += ("--per_device_train_batch_size",)
    kept = ("--save_steps", 1, "--keep_checkpoints", 0)
    straight = train(tmp_path / "straight", *options, 8, *kept)
    saved = [load_file(straight / f"checkpoint-{step}" / "model.safetensors") for step in range(1, 9)]
    final = load_file(straight / "final" / "model.safetensors")
    for name, weight in final.items():
        rows = [of[name][: len(weight)] for of in saved]  # without the padding of the vocabulary
        torch.testing.assert_close(weight, average_of(rows, 3), rtol=0, atol=1e-6)
    losses = {event["step"]: event for event in events(straight) if "eval_loss" in event}
    assert "eval_EMA_loss" not in losses[0] and losses[8]["eval_EMA_loss"] != losses[8]["eval_loss"]

    resumed = train(tmp_path / "resumed", *options, 4, "--stop_at_step", 4, launcher=("launch", 2))
    train(resumed, *options, 4, launcher=("launch", 2))
    ddp = train(tmp_path / "ddp", *options, 4, launcher=("torchrun", 2))
    for run in (resumed, ddp):
        others = {event["step"]: event for event in events(run) if "eval_loss" in event}
        for step in (4, 8):
            expected = pytest.approx(losses[step]["eval_EMA_loss"], abs=1e-5)
            assert others[step]["eval_EMA_loss"] == expected
        for name, weight in load_file(run / "final" / "model.safetensors").items():
            torch.testing.assert_close(weight, final[name], rtol=0, atol=1e-4)

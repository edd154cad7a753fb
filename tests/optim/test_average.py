"""The average of the weights is right, is resumed, and becomes the final model."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from gpt2_repro.optim.average import WeightAverage
from gpt2_repro.optim.muon import MuonWithAdamW, count_pieces
from tests.optim.simulation import average_of, draw_gradients, groups_of, require_mean, small_model


OPTIMIZERS: dict[str, Callable] = {
    "adamw": lambda model: torch.optim.AdamW(groups_of(model), lr=1e-2, fused=True),
    "muon": lambda model: MuonWithAdamW(groups_of(model), pieces=count_pieces(model), lr=1e-2),
}


def train_a_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, average: WeightAverage, step: int
) -> list[Tensor]:
    """Return the weights after the step."""
    draw_gradients(model, step)
    optimizer.step()
    average.on_optimizer_step(None, SimpleNamespace(global_step=step), None)
    return [weight.detach().clone() for weight in model.parameters()]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_average_equals_its_definition(name: str) -> None:
    model = small_model()
    optimizer, average = OPTIMIZERS[name](model), WeightAverage(4)
    average.attach(optimizer, None)
    seen: list[list[Tensor]] = []
    for step in range(10):
        assert average.exists == (step > 0)
        seen.append(train_a_step(model, optimizer, average, step))
    with average.applied():
        for number, weight in enumerate(model.parameters()):
            torch.testing.assert_close(weight.detach(), average_of([of[number] for of in seen], 4))
    assert all(map(torch.equal, model.parameters(), seen[-1]))
    # A checkpoint stores it.
    assert all("average" in state for state in optimizer.state_dict()["state"].values())


@pytest.mark.parametrize("restores", [True, False])
def test_an_average_that_begins_late_is_the_mean_of_its_own_steps(restores: bool) -> None:
    """A checkpoint may have no average. Its first weights must not stay in the average for longer than others."""
    model = small_model()
    optimizer = torch.optim.AdamW(groups_of(model), lr=1e-2)
    average = WeightAverage(50)
    average.attach(optimizer, None)
    seen: list[list[Tensor]] = []
    for step in range(1000, 1020):
        if restores and step == 1010:
            state = optimizer.state_dict()
            optimizer = torch.optim.AdamW(groups_of(model), lr=1e-2)
            optimizer.load_state_dict(state)
            average.attach(optimizer, None)
        seen.append(train_a_step(model, optimizer, average, step))
    with average.applied():
        for number, weight in enumerate(model.parameters()):
            torch.testing.assert_close(weight.detach(), torch.stack([of[number] for of in seen]).mean(0))


def test_the_average_survives_a_conversion_to_another_number_of_processes(train, tmp_path: Path) -> None:
    """The final model is the mean of the weights of all steps, half of which two processes have trained."""
    options = ("--ema_steps", 20, "--save_steps", 1, "--keep_checkpoints", 0, "--per_device_train_batch_size", 4)
    run = train(tmp_path / "run", *options, "--stop_at_step", 4, launcher=("launch", 2))
    train(run, *options, launcher=("launch", 1))
    require_mean(run, steps=8)

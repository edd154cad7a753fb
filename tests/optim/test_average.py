"""The average of the weights is right, is resumed, and becomes the final model."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from gpt2_repro.optim.average import WeightAverage
from gpt2_repro.optim.muon import MuonWithAdamW, count_pieces
from tests.optim.simulation import average_of, draw_gradients, groups_of, small_model


OPTIMIZERS: dict[str, Callable] = {
    "adamw": lambda model: torch.optim.AdamW(groups_of(model), lr=1e-2, fused=True),
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

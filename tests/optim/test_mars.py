"""MARS-AdamW equals a reference, on whole weights and on parts of a flat tensor."""

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from gpt2_repro.optim import mars
from gpt2_repro.optim.mars import MarsAdamW
from gpt2_repro.optim.schedule import follow
from tests.optim.simulation import Ranks, compare_parts_with_whole, draw_gradients, groups_of, small_model


RATES = {"lr": 6e-3, "betas": (0.9, 0.95), "eps": 1e-8}


class Reference:
    """MARS-AdamW of one weight, in the order of the authors' code.

    Source: `update_fn` in MARS/optimizers/mars.py of github.com/AGI-Arena/MARS at 4831e28.
    """

    def __init__(self, weight: Tensor, decay: float) -> None:
        self.weight, self.decay = weight.detach().clone(), decay
        self.is_matrix = weight.ndim == 2
        self.m, self.v, self.last, self.step = 0.0, 0.0, 0.0, 0

    def update(self, gradient: Tensor, lr: float) -> None:
        self.step += 1
        first, second, corrected = 0.9, 0.95, gradient
        if self.is_matrix:
            first, second = 0.95, 0.99
            corrected = gradient + 0.025 * first / (1 - first) * (gradient - self.last)
            corrected = corrected / max(1.0, float(corrected.norm()))
        else:
            lr = lr * 0.5
        self.m = first * self.m + (1 - first) * corrected
        self.v = second * self.v + (1 - second) * corrected**2
        mean, square = self.m / (1 - first**self.step), self.v / (1 - second**self.step)
        self.weight -= lr * (mean / (square.sqrt() + 1e-8) + self.decay * self.weight)
        self.last = gradient.clone()


def optimizer_of(model: nn.Module) -> MarsAdamW:
    return MarsAdamW(groups_of(model), **RATES)


def test_twenty_steps_equal_the_reference() -> None:
    model = small_model()
    references = [Reference(weight, 0.1 if weight.ndim == 2 else 0.0) for weight in model.parameters()]
    optimizer = optimizer_of(model)
    for number in range(20):
        rate = 6e-3 * (number + 1) / 20
        draw_gradients(model, number)
        for weight in model.parameters():
            weight.grad *= 10.0 ** (number % 3 - 2)  # with and without clipping
        before = [weight.grad.clone() for weight in model.parameters()]
        for group in optimizer.param_groups:
            group["lr"] = rate * group.get("lr_factor", 1.0)
        optimizer.step()
        for reference, weight, gradient in zip(references, model.parameters(), before, strict=True):
            reference.update(gradient, rate)
            assert torch.equal(weight.grad, gradient)
    for reference, weight in zip(references, model.parameters(), strict=True):
        torch.testing.assert_close(weight.detach(), reference.weight, rtol=0, atol=1e-5)


@pytest.mark.parametrize("number", [1, 2, 4])
def test_parts_of_a_flat_tensor_are_updated_like_whole_weights(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    compare_parts_with_whole(Ranks(number, mars, monkeypatch), optimizer_of, by="mars")


def test_the_schedule_keeps_the_lower_rate_of_vectors() -> None:
    optimizer = optimizer_of(small_model())
    schedule = LambdaLR(optimizer, lambda step: 1 / (step + 1))
    follow(schedule, 4e-3)
    assert {group["by"]: group["lr"] for group in optimizer.param_groups} == {"mars": 4e-3, "adamw": 2e-3}
    optimizer.step()
    schedule.step()
    assert {group["by"]: group["lr"] for group in optimizer.param_groups} == {"mars": 2e-3, "adamw": 1e-3}


def test_an_update_that_is_not_finite_leaves_no_trace() -> None:
    models = [small_model(), small_model()]
    optimizers = [optimizer_of(model) for model in models]
    for number in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            draw_gradients(model, number)
            optimizer.found_inf = torch.zeros(())
            optimizer.step()
        if number == 0:  # one of the two has an additional update that is skipped
            models[0].transformer.wte.weight.grad.fill_(float("nan"))
            optimizers[0].found_inf = torch.ones(())
            optimizers[0].step()
    for weight, other in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(weight, other)

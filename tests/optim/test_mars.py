"""MARS-AdamW equals a reference, on whole weights and on parts of a flat tensor."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from gpt2_repro.optim import mars
from gpt2_repro.optim.mars import MarsAdamW
from tests.optim.test_muon import draw_gradients, groups_of, small_model


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
    return MarsAdamW(groups_of(list(model.parameters())), **RATES)


def set_rate(optimizer: MarsAdamW, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("lr_factor", 1.0)


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
        set_rate(optimizer, rate)
        optimizer.step()
        for reference, weight, gradient in zip(references, model.parameters(), before, strict=True):
            reference.update(gradient, rate)
            assert torch.equal(weight.grad, gradient)
    for reference, weight in zip(references, model.parameters(), strict=True):
        torch.testing.assert_close(weight.detach(), reference.weight, rtol=0, atol=1e-5)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_parts_of_a_flat_tensor_are_updated_like_whole_weights(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under ZeRO-1 and 2, a rank has a part of all matrices, cut anywhere."""
    model = small_model()
    matrices = [weight for weight in model.parameters() if weight.ndim == 2]
    flat = torch.nn.utils.parameters_to_vector(matrices).detach()
    padding = flat.new_zeros(-len(flat) % (2 * ranks))
    parts = [nn.Parameter(part.clone()) for part in torch.cat([flat, padding]).chunk(ranks)]
    here, barrier = threading.local(), threading.Barrier(ranks)
    sent: list[Tensor] = [torch.empty(0)] * ranks

    def add(values: Tensor) -> None:
        sent[here.rank] = values.clone()
        barrier.wait()
        values.copy_(sum(sent))
        barrier.wait()

    monkeypatch.setattr(mars.dist, "get_rank", lambda: here.rank)
    monkeypatch.setattr(mars.dist, "all_reduce", add)
    whole, optimizers = optimizer_of(model), [optimizer_of(small_model()) for _ in range(ranks)]
    for optimizer, part in zip(optimizers, parts, strict=True):
        optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["by"] == "mars"]
        optimizer.param_groups[0]["params"] = [part]

    def step(rank: int) -> None:
        here.rank = rank
        optimizers[rank].step()

    for number in range(20):
        draw_gradients(model, number)
        gradients = torch.cat([weight.grad.flatten() for weight in matrices] + [padding])
        for part, gradient in zip(parts, gradients.chunk(ranks), strict=True):
            part.grad = gradient.clone()
        whole.step()
        with ThreadPoolExecutor(ranks) as pool:
            list(pool.map(step, range(ranks)))
    expected = torch.nn.utils.parameters_to_vector(matrices).detach()
    torch.testing.assert_close(torch.cat(parts).detach()[: len(expected)], expected, rtol=0, atol=1e-5)


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


@pytest.mark.slow
def test_runs_under_all_launchers_agree_and_resume(train, events, tmp_path: Path) -> None:
    options = ("--optim", "mars", "--learning_rate", 6e-3, "--accept_any_hardware", "true")
    options += ("--per_device_train_batch_size",)
    straight = train(tmp_path / "straight", *options, 8)
    resumed = train(tmp_path / "resumed", *options, 4, "--stop_at_step", 4, launcher=("launch", 2))
    train(resumed, *options, 4, launcher=("launch", 2))
    ddp = train(tmp_path / "ddp", *options, 4, launcher=("torchrun", 2))
    expected, *others = (
        [event["loss"] for event in events(run) if "loss" in event] for run in (straight, resumed, ddp)
    )
    assert len(expected) == 8
    for losses in others:
        assert losses == pytest.approx(expected, abs=1e-5)

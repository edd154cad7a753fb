"""A small GPT-2, random gradients, and ranks that are threads of one process."""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel


def small_model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    special = {"bos_token_id": None, "eos_token_id": None}
    return GPT2LMHeadModel(GPT2Config(vocab_size=40, n_positions=8, n_embd=16, n_layer=2, n_head=2, **special))


def groups_of(model: nn.Module) -> list[dict]:
    """Return the two parameter groups that Trainer creates: with and without decay."""
    weights = list(model.parameters())
    matrices = {"params": [weight for weight in weights if weight.ndim == 2], "weight_decay": 0.1}
    return [matrices, {"params": [weight for weight in weights if weight.ndim != 2], "weight_decay": 0.0}]


def draw_gradients(model: nn.Module, seed: int) -> None:
    torch.manual_seed(seed)
    for weight in model.parameters():
        weight.grad = torch.randn_like(weight)


def average_of(values: Sequence[Tensor], steps: int) -> Tensor:
    """Return the mean of the first values, moved by 1 / steps to each later value."""
    average = torch.stack([value.double() for value in values[:steps]]).mean(0)
    for value in values[steps:]:
        average = (1 - 1 / steps) * average + value.double() / steps
    return average.float()


def require_mean(run: Path, *, steps: int, tolerance: float = 1e-6) -> None:
    """Assert that the final model of a run is the mean of its checkpoints."""
    saved = [load_file(run / f"checkpoint-{step}" / "model.safetensors") for step in range(1, steps + 1)]
    for name, weight in load_file(run / "final" / "model.safetensors").items():
        rows = torch.stack([of[name][: len(weight)].float() for of in saved])  # without the padding of the vocabulary
        torch.testing.assert_close(weight, rows.mean(0), rtol=0, atol=tolerance)


class Ranks:
    """Simulates torch.distributed for a module of optimizers. Each rank is a thread."""

    def __init__(self, number: int, module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
        self.number, self.here, self.barrier = number, threading.local(), threading.Barrier(number)
        self.sent: list[Tensor] = [torch.empty(0)] * number
        monkeypatch.setattr(module.dist, "get_rank", self.rank)
        monkeypatch.setattr(module.dist, "get_world_size", lambda: number)
        monkeypatch.setattr(module.dist, "all_gather_into_tensor", self._gather)

    def rank(self) -> int:
        return self.here.rank

    def _gather(self, out: Tensor, part: Tensor) -> None:
        torch.cat(self._exchange(part), out=out)

    def _exchange(self, part: Tensor) -> list[Tensor]:
        self.barrier.wait()  # all ranks have read the parts of the collective before this one
        self.sent[self.here.rank] = part
        self.barrier.wait()
        return list(self.sent)

    def step(self, optimizers: list[torch.optim.Optimizer]) -> None:
        """Call the step of each rank's optimizer at the same time."""

        def run(rank: int) -> None:
            self.here.rank = rank
            optimizers[rank].step()

        with ThreadPoolExecutor(self.number) as pool:
            list(pool.map(run, range(self.number)))

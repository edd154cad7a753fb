"""UpdateGuard skips updates that are not finite, and a skipped update changes nothing."""

import copy
import json
import math
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gpt2_repro.errors import Diverged
from gpt2_repro.training.guard import MOST_IN_A_ROW, MOST_RECENT, RECENT_STEPS, UpdateGuard


class Waits(TorchDispatchMode):
    """Count the tensor values that are read as Python numbers. On a GPU, each would be a host sync."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function._schema.name == "aten::_local_scalar_dense"
        return function(*args, **(kwargs or {}))


class Run:
    """A model with one weight, whose updates are checked by an UpdateGuard."""

    def __init__(self, fused: bool = False) -> None:
        self.weight = torch.nn.Parameter(torch.ones(3))
        self.optimizer = torch.optim.AdamW([self.weight], lr=0.1, weight_decay=0.1, fused=fused)
        self.reported: list[int] = []
        self.guard = UpdateGuard(lambda step, _: self.reported.append(step))
        self.guard.attach(self.optimizer)
        self.step = 0

    def make_step(self, gradient: float) -> None:
        self.step += 1
        self.weight.grad = torch.full((3,), gradient)
        self.guard.see_norm(self.weight.grad.norm())
        self.optimizer.step()
        self.guard.after_step(self.step, passed_over=False)

    def update(self, gradient: float) -> bool:
        """Make one step. Return whether a weight, a moment or a step count changed."""
        before = copy.deepcopy((self.weight.data, self.optimizer.state_dict()["state"]))
        self.make_step(gradient)
        after = (self.weight.data, self.optimizer.state_dict()["state"])
        return not torch.equal(before[0], after[0]) or str(before[1]) != str(after[1])


@pytest.mark.parametrize("fused", [False, True])
def test_update_that_is_not_finite_changes_nothing(fused: bool) -> None:
    run = Run(fused)
    run.guard.see_norm(torch.tensor(-1.0))  # DeepSpeed's value
    assert run.guard._bad == 1 if fused else math.isnan(run.guard._norm)
    gradients = (1.0, math.nan, 1.0, math.inf, 1.0, -math.inf, 1.0)
    assert [run.update(gradient) for gradient in gradients] == [math.isfinite(gradient) for gradient in gradients]
    run.guard.settle()
    assert run.guard._on_device is fused and run.reported == [2, 4, 6] and run.weight.isfinite().all()


def test_fused_optimizer_skips_updates_without_host_sync() -> None:
    run = Run(fused=True)
    with Waits() as waits:
        for gradient in (*[math.nan] * (MOST_IN_A_ROW - 1), 1.0, *[math.nan] * MOST_IN_A_ROW):
            run.make_step(gradient)
    assert waits.count == 0 and run.guard.total == 2 * (MOST_IN_A_ROW - 1)
    with pytest.raises(Diverged, match="5 times .* step 10"):
        run.guard.state()  # called before a checkpoint is saved


def test_too_many_recent_skips_end_the_run() -> None:
    few = MOST_RECENT
    steps = RECENT_STEPS
    run = Run()
    # At the second to last bad update, the first one is no longer among the recent steps.
    for run.step in (*range(0, 50 * (few - 1), 50), steps + 1):
        run.update(math.nan)
    run.step += 10
    with pytest.raises(Diverged, match="20 times in 1000"):
        run.update(math.nan)


@pytest.mark.parametrize("earlier", [{}, {"windows": {"loss": [[3.1], 0], "gradient norm": [[], 0]}}])
def test_guard_state_is_restored_from_a_checkpoint(earlier: dict[str, Any]) -> None:
    """UpdateGuard makes the same decisions after a resume."""
    run, other = Run(), Run()
    for gradient in (1.0, *[math.nan] * (MOST_IN_A_ROW - 2)):
        run.update(gradient)
    other.guard.load_state(json.loads(json.dumps(run.guard.state() | earlier)))
    other.step = run.step
    assert other.guard.total == MOST_IN_A_ROW - 2
    other.update(math.nan)
    with pytest.raises(Diverged):
        other.update(math.nan)

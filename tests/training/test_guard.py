"""UpdateGuard skips harmful updates, and a skipped update changes nothing."""

import copy
import json
import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gpt2_repro.errors import Diverged
from gpt2_repro.training.guard import IN_A_ROW, RECENT, WINDOW, OutlierDetector, UpdateGuard


def test_score_uses_only_earlier_values(seed: int) -> None:
    source = random.Random(seed)
    values = [source.gauss(3, 0.1) for _ in range(400)]
    detector = OutlierDetector(limit=math.inf)
    for number, value in enumerate(values):
        before = values[max(0, number - WINDOW) : number]
        expected = (value - np.mean(before)) / np.std(before) if len(before) == WINDOW else 0.0
        assert detector.measure(value) == pytest.approx(expected)


def test_outlier_is_not_added_to_the_window_but_a_new_level_is() -> None:
    detector = OutlierDetector(6.0, [3 + 0.1 * (-1) ** number for number in range(WINDOW)])
    for bad in (math.nan, math.inf, -math.inf):
        assert detector.measure(bad) == 0.0  # the detector is not turned off
    # The score in llm.c cannot exceed 11.3. The first outlier does not change the score of the second.
    assert detector.measure(30.0) == detector.measure(30.0) == pytest.approx(270)
    assert detector.measure(3.1) == pytest.approx(1.0)
    scores = [detector.measure(30.0) for _ in range(4)]
    assert scores[:3] == pytest.approx([scores[0]] * 3) and scores[3] < 12 < scores[0]
    assert OutlierDetector(6.0, [1.0] * WINDOW).measure(2.0) == 0.0  # a window without deviation gives no score


ONE = torch.tensor(1.0)


class Waits(TorchDispatchMode):
    """Count the tensor values that are read as Python numbers. On a GPU, each would be a host sync."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function._schema.name == "aten::_local_scalar_dense"
        return function(*args, **(kwargs or {}))


class Run:
    """A model with one weight, whose updates are checked by an UpdateGuard."""

    def __init__(self, fused: bool = False, skip_loss_z: float = 0.0, skip_grad_z: float = 0.0) -> None:
        self.weight = torch.nn.Parameter(torch.ones(3))
        self.optimizer = torch.optim.AdamW([self.weight], lr=0.1, weight_decay=0.1, fused=fused)
        self.reported: list[int] = []
        self.guard = UpdateGuard(skip_loss_z, skip_grad_z, lambda step, _: self.reported.append(step))
        self.guard.attach(self.optimizer)
        self.step = 0

    def make_step(self, gradient: float, loss: torch.Tensor = ONE) -> None:
        self.step += 1
        self.weight.grad = torch.full((3,), gradient)
        self.guard.see_loss(loss)
        self.guard.see_norm(self.weight.grad.norm())
        self.optimizer.step()
        self.guard.after_step(self.step, passed_over=False)

    def update(self, gradient: float, loss: float = 1.0) -> bool:
        """Make one step. Return whether a weight, a moment or a step count changed."""
        before = copy.deepcopy((self.weight.data, self.optimizer.state_dict()["state"]))
        self.make_step(gradient, torch.tensor(loss))
        after = (self.weight.data, self.optimizer.state_dict()["state"])
        return not torch.equal(before[0], after[0]) or str(before[1]) != str(after[1])


@pytest.mark.parametrize("limit", ["skip_loss_z", "skip_grad_z"])
def test_outliers_are_skipped_only_if_requested(limit: str) -> None:
    for run, skipped in ((Run(**{limit: 6.0}), [WINDOW + 1]), (Run(), [])):
        for number in range(WINDOW):
            noise = 0.01 * (-1) ** number
            assert run.update(1.0 + noise, 3.0 + noise)
        spike = {"skip_loss_z": (1.0, 9.0), "skip_grad_z": (9.0, 3.0)}[limit]
        assert run.update(*spike) is not bool(skipped)
        assert run.update(1.0, 3.0) and run.reported == skipped


@pytest.mark.parametrize("fused", [False, True])
def test_update_that_is_not_finite_changes_nothing(fused: bool) -> None:
    run = Run(fused)
    gradients = (1.0, math.nan, 1.0, math.inf, 1.0, -math.inf, 1.0)
    assert [run.update(gradient) for gradient in gradients] == [math.isfinite(gradient) for gradient in gradients]
    run.guard.settle()
    assert run.guard._on_device is fused and run.reported == [2, 4, 6] and run.weight.isfinite().all()


def test_fused_optimizer_skips_updates_without_host_sync() -> None:
    run = Run(fused=True)
    with Waits() as waits:
        for gradient in (*[math.nan] * (IN_A_ROW - 1), 1.0, *[math.nan] * IN_A_ROW):
            run.make_step(gradient)
    assert waits.count == 0 and run.guard.total == 2 * (IN_A_ROW - 1)
    with pytest.raises(Diverged, match="5 times .* step 10"):
        run.guard.state()  # called before a checkpoint is saved


def test_too_many_recent_skips_end_the_run() -> None:
    few, steps = RECENT
    run = Run()
    # At the second to last bad update, the first one is no longer among the recent steps.
    for run.step in (*range(0, 50 * (few - 1), 50), steps + 1):
        run.update(math.nan)
    run.step += 10
    with pytest.raises(Diverged, match="20 times in 1000"):
        run.update(math.nan)


def test_guard_state_is_restored_from_a_checkpoint() -> None:
    """UpdateGuard makes the same decisions after a resume."""
    run, other, source = Run(skip_loss_z=6.0), Run(skip_loss_z=6.0), random.Random(1)
    for gradient in (*[1.0] * (WINDOW + 20), *[math.nan] * (IN_A_ROW - 2)):
        run.update(gradient, source.gauss(3, 0.1))
    other.guard.load_state(json.loads(json.dumps(run.guard.state())))
    other.step = run.step
    for loss in [source.gauss(3, 0.1) for _ in range(20)]:
        assert run.guard.detectors["loss"].measure(loss) == other.guard.detectors["loss"].measure(loss)
    other.update(math.nan)
    with pytest.raises(Diverged):
        other.update(math.nan)

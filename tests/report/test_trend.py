"""Losses that get worse during a run."""

import math

import pytest

from gpt2_repro.report.trend import risen_training_loss, rising_validation


@pytest.mark.parametrize(
    ("losses", "worse"),
    [
        ((3.0, 3.1, 3.2), False),
        ((3.0, 3.1, 3.2, 3.3), True),
        ((3.0, 3.1, 3.2, 3.2), False),
        ((3.0, 3.1, 3.2, 3.3, 3.2), False),
        ((4.0, 3.9, 3.0, 3.1, 3.2, 3.3), True),
        ((3.0, 3.1, math.nan, 3.3, 3.4), False),
    ],
)
def test_three_rises_in_a_row(losses: tuple[float, ...], worse: bool) -> None:
    assert (rising_validation(losses) is not None) is worse


def test_training_loss_far_above_its_best() -> None:
    rows = [{"step": step, "loss": 8 - step / 100 + (step % 3 - 1) * 0.9} for step in range(1, 401)]
    assert risen_training_loss([]) is None
    assert risen_training_loss(rows) is None  # noise
    rows.append({"step": 402, "loss": 20.0})
    assert risen_training_loss(rows) is None  # one spike
    rows += [{"step": step, "loss": 6.0} for step in range(403, 600)]
    assert risen_training_loss(rows) is not None
    rows += [{"step": step, "loss": 4.0} for step in range(600, 1200)]
    assert risen_training_loss(rows) is None


@pytest.mark.parametrize("interval", [1, 10])
def test_sparse_logs_are_smoothed_over_the_same_steps(interval: int) -> None:
    """A step from 5 to 6 is more than 0.5 above the best after 100 * ln 2 = 69.3 steps."""
    rows = [{"step": step, "loss": 5.0 if step <= 100 else 6.0} for step in range(interval, 171, interval)]
    assert risen_training_loss(rows) is not None
    assert risen_training_loss([row for row in rows if row["step"] <= 160]) is None

"""Detect losses that get worse during a run."""

import itertools
import math
from collections.abc import Sequence
from typing import Any


RISES = 3  # validations in a row, each worse than the one before it
ABOVE_BEST = 0.5  # nats that the smoothed training loss may lie above its lowest value
STEPS = 100  # time constant of the smoothing


def rising_validation(losses: Sequence[float]) -> str | None:
    """Return a message if each of the last RISES validation losses is worse than the one before it."""
    last = losses[-RISES - 1 :]
    if len(last) <= RISES or not all(later > earlier for earlier, later in itertools.pairwise(last)):
        return None
    return f"the validation loss has risen {RISES} times in a row, from {last[0]:.4f} to {last[-1]:.4f}"


def risen_training_loss(rows: Sequence[dict[str, Any]]) -> str | None:
    """Return a message if the smoothed training loss is more than ABOVE_BEST above its lowest value.

    Args:
        rows: training events with a finite `loss`, ordered by step.
    """
    if not rows:
        return None
    smoothed = best = rows[0]["loss"]
    for before, row in itertools.pairwise(rows):
        weight = 1 - math.exp(-(row["step"] - before["step"]) / STEPS)
        smoothed += weight * (row["loss"] - smoothed)
        best = min(best, smoothed)
    if smoothed - best <= ABOVE_BEST:
        return None
    return f"the training loss over the last {STEPS} steps is {smoothed:.4f}, {best:.4f} at its best"

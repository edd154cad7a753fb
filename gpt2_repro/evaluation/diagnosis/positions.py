"""Where in the window a model that was sound before does worse: positions that were not trained."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gpt2_repro.evaluation.diagnosis.profiles import Estimate, Targets, mean


# A cause is named where it is worth NATS and lies ERRORS standard errors from chance: several places are looked at, and
# whoever reads it may pay for another run.
NATS = 0.05
ERRORS = 4
SKIPPED = 4  # the first positions of a row, which know hardly any context
SHARP = 0.5  # parts of a rise that come at once; on text that it does not know a model may drift


def position_edges(window: int) -> list[int]:
    """Where the buckets of positions begin and the last one ends: doubled, then sixteenths, and the last by itself.

    The last position is never trained where a loss shifts its labels inside a row of no more than the window.
    """
    sixteenth = max(1, window // 16)
    doubled = [2**power for power in range(window.bit_length()) if 2**power < sixteenth]
    return sorted({0, *doubled, *range(sixteenth, window, sixteenth), window - 1, window})


@dataclasses.dataclass(frozen=True)
class Jump:
    """The position from which on a model does worse beside the baseline than before it.

    Args:
        difference: by how much, in nats.
        ours, theirs: by how much each one's own loss rises there; more context lowers a sound model's.
    """

    position: int
    difference: Estimate
    ours: Estimate
    theirs: Estimate


def find_jump(targets: Targets, edges: Sequence[int]) -> Jump | None:
    """The edge from which on both the difference and the model's own loss are higher than before it, if there is one.

    Args:
        targets: of rows that fill the window, so that all positions have the same text.
    """
    if not len(targets.row):
        return None
    window, buckets = edges[-1], len(edges) - 1
    _, row = np.unique(targets.row, return_inverse=True)
    cell = row * buckets + np.searchsorted(edges, targets.position, side="right") - 1
    # Of each row the losses summed up to each edge [rows, edges].
    ours, theirs = (
        np.pad(
            np.bincount(cell, losses, minlength=(row.max() + 1) * buckets).reshape(-1, buckets).cumsum(1),
            [(0, 0), (1, 0)],
        )
        for losses in (targets.ours, targets.theirs)
    )
    first = max(index for index, edge in enumerate(edges) if edge <= SKIPPED)
    best: Jump | None = None
    explained = 0.0  # of the variance over the positions, by a step there
    for index in range(first + 1, buckets):
        before, after = edges[index] - edges[first], window - edges[index]
        our_rise, their_rise = (_rise(sums, edges, first, index, buckets) for sums in (ours, theirs))
        jump = Jump(edges[index], mean(our_rise - their_rise), mean(our_rise), mean(their_rise))
        at_once = mean(_rise(ours - theirs, edges, index - 1, index, index + 1))
        if (
            jump.difference.exceeds(NATS, errors=ERRORS)
            and jump.ours.exceeds(0, errors=2)
            and at_once.value > SHARP * jump.difference.value
        ):
            by_step = jump.difference.value**2 * before * after / (before + after)
            best, explained = (jump, by_step) if by_step > explained else (best, explained)
    return best


def _rise(sums: NDArray[np.float64], edges: Sequence[int], first: int, middle: int, last: int) -> NDArray[np.float64]:
    """Of each row the mean loss from the edge `middle` to `last` less that from `first` to `middle` [rows]."""
    later = (sums[:, last] - sums[:, middle]) / (edges[last] - edges[middle])
    return later - (sums[:, middle] - sums[:, first]) / (edges[middle] - edges[first])

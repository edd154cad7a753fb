"""Where in the window a model that was sound before does worse: positions that were not trained."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gpt2_repro.evaluation.diagnosis.profiles import Estimate, Targets, clustered


# A cause is named where it is worth NATS and lies ERRORS standard errors from chance: several places are looked at, and
# whoever reads it may pay for another run.
NATS = 0.05
ERRORS = 4
SKIPPED = 4  # the first positions of a row, which know hardly any context
LARGE = 0.5  # a jump is that part of the difference before it, or more
OWN = 0.5  # and that part of it the model's own loss: one that makes nothing of context falls behind without rising
SHARP = 0.25  # and that part of it comes at its edge: on text that it does not know a model may drift


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
    """The first edge from which on both the difference and the model's own loss are higher than before it, if there is one.

    Args:
        targets: of rows that fill the window, so that all positions have the same text. Rows of one document are no
            independent evidence.
    """
    if not len(targets.row):
        return None
    buckets = len(edges) - 1
    _, firsts, row = np.unique(targets.row, return_index=True, return_inverse=True)
    document = targets.document[firsts]
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
    gap = ours - theirs
    for index in range(first + 1, buckets):
        of_rows = (_rise(sums, edges, first, index, buckets) for sums in (gap, ours, theirs))
        jump = Jump(edges[index], *(clustered(rise, document)[0] for rise in of_rows))
        at_once, _ = clustered(_rise(gap, edges, index - 1, index, index + 1), document)
        earlier = (gap[:, index] - gap[:, first]).mean() / (edges[index] - edges[first])
        if (
            jump.difference.exceeds(max(NATS, LARGE * earlier), errors=ERRORS)
            and jump.ours.exceeds(OWN * jump.difference.value, errors=2)
            and at_once.exceeds(SHARP * jump.difference.value, errors=2)
        ):
            return jump
    return None


def _rise(sums: NDArray[np.float64], edges: Sequence[int], first: int, middle: int, last: int) -> NDArray[np.float64]:
    """Of each row the mean loss from the edge `middle` to `last` less that from `first` to `middle` [rows]."""
    later = (sums[:, last] - sums[:, middle]) / (edges[last] - edges[middle])
    return later - (sums[:, middle] - sums[:, first]) / (edges[middle] - edges[first])

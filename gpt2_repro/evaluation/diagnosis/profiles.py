"""Two models' losses on the same tokens in buckets, and the position from which on one of them does worse."""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpt2_repro.evaluation.diagnosis.texts import Losses, Row


# A cause is named where it is worth NATS and lies ERRORS standard errors from chance: several places are looked at, and
# whoever reads it may pay for another run.
NATS = 0.05
ERRORS = 4
SKIPPED = 4  # the first positions of a row, which have hardly any context
LARGE = 0.5  # a jump is that part of the difference before it, or more
OWN = 0.5  # and that part of it the model's own loss: one that makes nothing of context falls behind without rising
SHARP = 0.25  # and that part of it comes at its edge: on unfamiliar text a model may drift
PER_MILLION = (1000, 100, 10, 1)  # the limits between frequent and rare tokens


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A mean and its standard error."""

    value: float
    stderr: float

    def exceeds(self, bound: float, *, errors: float = ERRORS) -> bool:
        """Return whether it lies above the bound and so many standard errors above zero."""
        return self.value > bound and self.value > errors * self.stderr

    def __str__(self) -> str:
        return f"{self.value:+.3f} ± {self.stderr:.3f}".replace("-", "−")


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Two models' means on some of the tokens, in nats, and their difference."""

    label: str
    tokens: int
    documents: int
    ours: float
    theirs: float
    difference: Estimate


@dataclasses.dataclass(frozen=True)
class Jump:
    """The position from which on a model's difference to the baseline is larger than before.

    Args:
        ours, theirs: by how much each model's own loss rises there; more context lowers that of a sound model.
    """

    position: int
    difference: Estimate
    ours: Estimate
    theirs: Estimate


def join(rows: Sequence[Row], ours: Losses, theirs: Losses, *, separator: int | None = None) -> Any:
    """Return a record array of all targets with both models' losses.

    `position` is that of the id before the target. `spoiled` is true after the first separator of a row.
    """
    counts = [len(row.ids) - 1 for row in rows]
    return records(
        domain=np.repeat([row.domain for row in rows], counts),
        row=np.repeat(np.arange(len(rows)), counts),
        document=np.repeat([row.document for row in rows], counts),
        position=np.concatenate([np.arange(count) for count in counts]),
        token=np.concatenate([row.ids[1:] for row in rows]).astype(np.int64),
        spoiled=np.concatenate([np.cumsum(row.ids[:-1] == separator) > 0 for row in rows]),
        ours=np.concatenate(ours).astype(np.float64),
        theirs=np.concatenate(theirs).astype(np.float64),
    )


def records(**arrays: NDArray[Any]) -> Any:
    """Return arrays of one length as a record array."""
    return np.rec.fromarrays(tuple(arrays.values()), dtype=[(name, its.dtype) for name, its in arrays.items()])


def buckets(targets: Any, group: NDArray[Any], labels: Sequence[str]) -> list[Bucket]:
    """Return one bucket per group that has targets.

    Args:
        targets: with the arrays `ours`, `theirs` and `document`.
        group: an index of `labels` for each target.
    """
    found = []
    for number, label in enumerate(labels):
        chosen = group == number
        if chosen.any():
            ours, theirs = targets.ours[chosen], targets.theirs[chosen]
            difference, documents = clustered(ours - theirs, targets.document[chosen])
            found.append(Bucket(label, len(ours), documents, float(ours.mean()), float(theirs.mean()), difference))
    return found


def by_place(targets: Any, place: NDArray[np.int64], edges: Sequence[int]) -> list[Bucket]:
    """Return a bucket for the places from each edge to the next."""
    labels = [f"{low:,}" if low + 1 == high else f"{low:,} to {high - 1:,}" for low, high in itertools.pairwise(edges)]
    return buckets(targets, np.searchsorted(edges, place, side="right") - 1, labels)


def by_frequency(targets: Any, counts: NDArray[np.int64]) -> list[Bucket]:
    """Return buckets of tokens that are equally frequent in a text with these counts [vocabulary]."""
    per_million = counts[targets.token] * 1e6 / counts.sum()
    between = [f"{low:,} to {high:,}" for high, low in itertools.pairwise(PER_MILLION)]
    group = len(PER_MILLION) - np.searchsorted(PER_MILLION[::-1], per_million, side="right")
    return buckets(targets, group, [f"{PER_MILLION[0]:,} and more", *between, "under 1"])


def clustered(values: NDArray[np.floating[Any]], cluster: NDArray[np.int64]) -> tuple[Estimate, int]:
    """Return the mean, with the standard error for values that depend on each other in a cluster, and the clusters."""
    _, cluster = np.unique(cluster, return_inverse=True)
    mean, counts = values.mean(), np.bincount(cluster)
    if len(counts) < 2:
        return Estimate(float(mean), math.inf), len(counts)
    residuals = np.bincount(cluster, values) - mean * counts
    spread = math.sqrt((residuals**2).sum() * len(counts) / (len(counts) - 1))
    return Estimate(float(mean), spread / len(values)), len(counts)


def position_edges(window: int) -> list[int]:
    """Return where buckets of positions begin and the last one ends: doubled, then sixteenths, and the last by itself.

    The last position is never trained if a loss shifts its labels inside a row of no more than the window.
    """
    sixteenth = max(1, window // 16)
    doubled = [2**power for power in range(window.bit_length()) if 2**power < sixteenth]
    return sorted({0, *doubled, *range(sixteenth, window, sixteenth), window - 1, window})


def find_jump(targets: Any, edges: Sequence[int]) -> Jump | None:
    """Return the first edge from which on both the difference and the model's own loss are higher than before it.

    Args:
        targets: of rows that fill the window, so that all positions have the same text.
    """
    if not len(targets):
        return None
    count = len(edges) - 1
    _, firsts, row = np.unique(targets.row, return_index=True, return_inverse=True)
    document = targets.document[firsts]
    cell = row * count + np.searchsorted(edges, targets.position, side="right") - 1
    # Each row's losses, summed up to each edge [rows, edges].
    ours, theirs = (
        np.pad(
            np.bincount(cell, losses, minlength=(row.max() + 1) * count).reshape(-1, count).cumsum(1),
            [(0, 0), (1, 0)],
        )
        for losses in (targets.ours, targets.theirs)
    )
    first = max(index for index, edge in enumerate(edges) if edge <= SKIPPED)
    gap = ours - theirs
    for index in range(first + 1, count):
        of_rows = (_rise(sums, edges, first, index, count) for sums in (gap, ours, theirs))
        jump = Jump(edges[index], *(clustered(rise, document)[0] for rise in of_rows))
        at_once, _ = clustered(_rise(gap, edges, index - 1, index, index + 1), document)
        earlier = (gap[:, index] - gap[:, first]).mean() / (edges[index] - edges[first])
        if (
            jump.difference.exceeds(max(NATS, LARGE * earlier))
            and jump.ours.exceeds(OWN * jump.difference.value, errors=2)
            and at_once.exceeds(SHARP * jump.difference.value, errors=2)
        ):
            return jump
    return None


def _rise(sums: NDArray[np.float64], edges: Sequence[int], first: int, middle: int, last: int) -> NDArray[np.float64]:
    """Return each row's mean loss from edge `middle` to `last` minus that from `first` to `middle` [rows]."""
    later = (sums[:, last] - sums[:, middle]) / (edges[last] - edges[middle])
    return later - (sums[:, middle] - sums[:, first]) / (edges[middle] - edges[first])

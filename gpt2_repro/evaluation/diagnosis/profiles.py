"""Two models' losses on the same tokens in buckets, and the position from which on one of them does worse."""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpt2_repro.evaluation.diagnosis.texts import EDGE_TOKENS, Losses, Row


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


def join(rows: Sequence[Row], losses: Iterable[Losses], *, separator: int | None = None) -> Any:
    """Return a record array of all targets with both models' losses.

    `position` is that of the id before the target. `spoiled` is true after the first separator of a row.
    """

    def flat(of_rows: Iterable[NDArray[Any]], dtype: Any = np.int64) -> NDArray[Any]:
        return np.concatenate([np.empty(0, dtype), *of_rows], dtype=dtype)

    return records(
        part=flat((np.full(len(row.ids) - 1, row.part) for row in rows), np.dtype("U6")),
        domain=flat(np.full(len(row.ids) - 1, row.domain) for row in rows),
        row=flat(np.full(len(row.ids) - 1, number) for number, row in enumerate(rows)),
        document=flat(np.full(len(row.ids) - 1, row.document) for row in rows),
        position=flat(np.arange(len(row.ids) - 1) for row in rows),
        token=flat(row.ids[1:] for row in rows),
        spoiled=flat((np.cumsum(row.ids[:-1] == separator) > 0 for row in rows), np.bool_),
        **{name: flat(its, np.float64) for name, its in zip(("ours", "theirs"), losses, strict=True)},
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
        chosen = targets[group == number]
        if len(chosen):
            difference, documents = clustered(chosen.ours - chosen.theirs, chosen.document)
            means = float(chosen.ours.mean()), float(chosen.theirs.mean())
            found.append(Bucket(label, len(chosen), documents, *means, difference))
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


def document_edges(targets: Any) -> dict[str, list[Bucket]]:
    """Return the losses on the separator, on a document's first ids after a start token and without it."""
    ends, starts, bare = (targets[targets.part == part] for part in ("ends", "starts", "bare"))
    ends = ends[ends.position == ends.position.max(initial=0)]
    count = starts.position.max(initial=0) + 1
    edges = [*(2**power for power in range(EDGE_TOKENS.bit_length()) if 2**power <= count), count + 1]
    cost = starts[starts.position > 0]
    cost.ours -= bare.ours
    cost.theirs -= bare.theirs
    return {
        "ends": buckets(ends, np.zeros(len(ends)), ["the separator"]),
        "starts": by_place(starts, starts.position + 1, edges),
        "bare": by_place(bare, bare.position + 2, edges),
        "start_cost": buckets(cost, np.zeros(len(cost)), ["all but the first"]),
    }


def last_words(
    rows: Sequence[Row], losses: Iterable[Losses], *, names: Sequence[str], longest: int
) -> dict[str, list[Bucket]]:
    """Return the log-probabilities of last words, of the passages that end before the position `longest`."""
    numbers = [number for number, row in enumerate(rows) if row.part == "words"]
    words = np.array([[-of_model[number][-rows[number].targets :].sum() for number in numbers] for of_model in losses])
    kept = np.array([len(rows[number].ids) - 1 <= longest for number in numbers[::2]], np.bool_)
    whole, sentence = words[:, ::2][:, kept], words[:, 1::2][:, kept]
    domain = np.array([rows[number].domain for number in numbers[::2]])[kept]
    tables = {}
    for name, (ours, theirs) in {"whole": whole, "sentence": sentence, "gain": whole - sentence}.items():
        pairs = records(ours=ours, theirs=theirs, document=np.arange(len(domain)))
        tables[name] = buckets(pairs, domain, names)
    return tables


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


def find_jump(full: Any, edges: Sequence[int]) -> Jump | None:
    """Return the first edge from which on both the difference and the model's own loss are higher than before it.

    Args:
        full: targets of rows that fill the window, so that all positions have the same text.
    """
    if not len(full):
        return None
    window, first = edges[-1], max(edge for edge in edges if edge <= SKIPPED)
    ours, theirs, document = (values.reshape(-1, window) for values in (full.ours, full.theirs, full.document))

    def rise(losses: NDArray[np.float64], start: int, middle: int, end: int) -> Estimate:
        """Return by how much the mean loss from `middle` to `end` is above that from `start` to `middle`."""
        return clustered(losses[:, middle:end].mean(1) - losses[:, start:middle].mean(1), document[:, 0])[0]

    gap = ours - theirs
    for before, edge, after in zip(edges, edges[1:], edges[2:], strict=False):
        if edge <= first:
            continue
        jump = Jump(edge, *(rise(losses, first, edge, window) for losses in (gap, ours, theirs)))
        if (
            jump.difference.exceeds(max(NATS, LARGE * gap[:, first:edge].mean()))
            and jump.ours.exceeds(OWN * jump.difference.value, errors=2)
            and rise(gap, before, edge, after).exceeds(SHARP * jump.difference.value, errors=2)
        ):
            return jump
    return None

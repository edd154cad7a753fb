"""Two models' losses on the same tokens: by domain, by position in the window, by how frequent a token is."""

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gpt2_repro.evaluation.diagnosis.scoring import RowScore
from gpt2_repro.evaluation.diagnosis.texts import Sample


PER_MILLION = (1000, 100, 10, 1)  # the limits between frequent and rare tokens


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A mean and its standard error."""

    value: float
    stderr: float

    def exceeds(self, bound: float, *, errors: float) -> bool:
        """Whether it lies above the bound and so many standard errors above zero."""
        return self.value > bound and self.value > errors * self.stderr

    def minus(self, other: "Estimate") -> "Estimate":
        """The difference of two means of other documents."""
        return Estimate(self.value - other.value, math.hypot(self.stderr, other.stderr))


@dataclasses.dataclass(frozen=True)
class Bucket:
    """The mean losses of two models on some of the tokens, in nats, and their difference."""

    label: str
    tokens: int
    documents: int
    ours: float
    theirs: float
    difference: Estimate


@dataclasses.dataclass(frozen=True)
class Targets:
    """All targets of a sample, each [targets]: where they stand, what they are, what each model lost on them in nats."""

    names: list[str]
    domain: NDArray[np.int64]
    row: NDArray[np.int64]
    document: NDArray[np.int64]
    position: NDArray[np.int64]  # that predicts it: 0 for the second id of a row
    token: NDArray[np.int64]
    spoiled: NDArray[np.bool_]  # whether a separator stands before it in its row
    ours: NDArray[np.float64]
    theirs: NDArray[np.float64]

    def where(self, kept: NDArray[np.bool_]) -> "Targets":
        """Those of the mask [targets]."""
        arrays = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "names"}
        return Targets(self.names, **{name: values[kept] for name, values in arrays.items()})


def join(
    sample: Sample, ours: Sequence[RowScore], theirs: Sequence[RowScore], *, separator: int | None = None
) -> Targets:
    """The targets of the rows with the scores that two models have on them."""
    counts = np.array([len(row) - 1 for row in sample.rows])
    return Targets(
        sample.names,
        domain=np.repeat(sample.domain, counts),
        row=np.repeat(np.arange(len(counts)), counts),
        document=np.repeat(sample.document, counts),
        position=np.concatenate([np.arange(count) for count in counts]),
        token=np.concatenate([row[1:] for row in sample.rows]).astype(np.int64),
        spoiled=np.concatenate([np.cumsum(row[:-1] == separator) > 0 for row in sample.rows]),
        ours=np.concatenate([score.losses for score in ours]).astype(np.float64),
        theirs=np.concatenate([score.losses for score in theirs]).astype(np.float64),
    )


def by_domain(targets: Targets) -> list[Bucket]:
    """Of each domain that has targets."""
    return _buckets(targets, targets.domain, targets.names)


def by_position(targets: Targets, edges: Sequence[int]) -> list[Bucket]:
    """Of the positions from each edge to the next."""
    labels = [f"{low:,}" if low + 1 == high else f"{low:,} to {high - 1:,}" for low, high in itertools.pairwise(edges)]
    return _buckets(targets, np.searchsorted(edges, targets.position, side="right") - 1, labels)


def by_frequency(targets: Targets, counts: NDArray[np.int64]) -> list[Bucket]:
    """Of tokens as frequent in a text as `counts` [vocabulary] says."""
    per_million = counts[targets.token] * 1e6 / counts.sum()
    labels = [
        f"{PER_MILLION[0]:,} and more",
        *(f"{low:,} to {high:,}" for high, low in itertools.pairwise(PER_MILLION)),
        "under 1",
    ]
    group = len(PER_MILLION) - np.searchsorted(PER_MILLION[::-1], per_million, side="right")
    return _buckets(targets, group, labels)


def _buckets(targets: Targets, group: NDArray[np.int64], labels: Sequence[str]) -> list[Bucket]:
    found = []
    for number, label in enumerate(labels):
        chosen = group == number
        if not chosen.any():
            continue
        ours, theirs = targets.ours[chosen], targets.theirs[chosen]
        difference, documents = clustered(ours - theirs, targets.document[chosen])
        found.append(Bucket(label, len(ours), documents, float(ours.mean()), float(theirs.mean()), difference))
    return found


def clustered(values: NDArray[np.float64], cluster: NDArray[np.int64]) -> tuple[Estimate, int]:
    """The mean of the values, its standard error where those of one cluster are no independent evidence; the clusters."""
    _, cluster = np.unique(cluster, return_inverse=True)
    mean, counts = values.mean(), np.bincount(cluster)
    if len(counts) < 2:
        return Estimate(float(mean), math.inf), len(counts)
    residuals = np.bincount(cluster, values) - mean * counts
    spread = math.sqrt((residuals**2).sum() * len(counts) / (len(counts) - 1))
    return Estimate(float(mean), spread / len(values)), len(counts)


def mean(values: NDArray[np.float64]) -> Estimate:
    """Of independent values."""
    stderr = float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.inf
    return Estimate(float(values.mean()), stderr)

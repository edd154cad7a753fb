"""Average two models' losses over groups of tokens, and find jumps of the loss."""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpt2_repro.evaluation.diagnosis.texts import EDGE_TOKENS, Losses, Row


# An effect counts as a cause if it is larger than NATS and than ERRORS standard errors. The limits are strict, because
# several places are tested and a user may pay for another run because of the result.
NATS = 0.05
ERRORS = 4
SKIPPED = 4  # first positions of a row, which have hardly any context
# A jump in the difference has at least this fraction of the difference before it.
LARGE = 0.5
# At least this fraction of a jump is a rise of the model's own loss. Without such a rise, the model may
# only fail to use context, from which the baseline gains.
OWN = 0.5
# At least this fraction of a jump happens at its edge. On unfamiliar text the difference may grow slowly.
SHARP = 0.25
PER_MILLION = (1000, 100, 10, 1)  # limits between frequent and rare tokens, in occurrences per million tokens


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A mean and its standard error."""

    value: float
    stderr: float

    def exceeds(self, bound: float, *, errors: float = ERRORS) -> bool:
        """Return whether the mean exceeds both `bound` and `errors` * `stderr`."""
        return self.value > bound and self.value > errors * self.stderr

    def __str__(self) -> str:
        return f"{self.value:+.3f} ± {self.stderr:.3f}".replace("-", "−")


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Mean losses or log-probabilities of two models on a group of tokens, in nats."""

    label: str
    tokens: int
    documents: int
    ours: float
    theirs: float
    difference: Estimate


@dataclasses.dataclass(frozen=True)
class Jump:
    """A position in a row at which the loss difference between two models increases.

    An increase is the mean after this position minus the mean before this position.

    Args:
        difference: the increase of the loss difference (the model's loss minus the baseline's loss).
        ours, theirs: the increase of the model's loss, and the increase of the baseline's loss.
    """

    position: int
    difference: Estimate
    ours: Estimate  # negative without a defect, because later positions have more context
    theirs: Estimate


def join(rows: Sequence[Row], losses: Iterable[Losses], *, separator: int | None = None) -> Any:
    """Return a record array: the losses of both models on each target (id to predict).

    The field `position` is the position of the input id before the target. The field `spoiled` is true if the row
    contains `separator` before the target, because the input can then contain text of another document.
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
    """Combine arrays of equal length into a record array with one field per array."""
    return np.rec.fromarrays(tuple(arrays.values()), dtype=[(name, its.dtype) for name, its in arrays.items()])


def buckets(targets: Any, group: NDArray[Any], labels: Sequence[str]) -> list[Bucket]:
    """Return one bucket (mean losses) for each group that has targets.

    Args:
        targets: a record array with the fields `ours`, `theirs` and `document`.
        group: an index into `labels` for each target.
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
    """Return one bucket (mean losses) for each range of positions.

    Args:
        place: the position of each target.
        edges: the first position of each range, and the end of the last range.
    """
    labels = [f"{low:,}" if low + 1 == high else f"{low:,} to {high - 1:,}" for low, high in itertools.pairwise(edges)]
    return buckets(targets, np.searchsorted(edges, place, side="right") - 1, labels)


def by_frequency(targets: Any, counts: NDArray[np.int64]) -> list[Bucket]:
    """Return one bucket (mean losses) for each range of token frequencies.

    `counts` has shape [vocabulary] and contains the number of times each id occurs in a text.
    """
    per_million = counts[targets.token] * 1e6 / counts.sum()
    between = [f"{low:,} to {high:,}" for high, low in itertools.pairwise(PER_MILLION)]
    group = len(PER_MILLION) - np.searchsorted(PER_MILLION[::-1], per_million, side="right")
    return buckets(targets, group, [f"{PER_MILLION[0]:,} and more", *between, "under 1"])


def document_edges(targets: Any) -> dict[str, list[Bucket]]:
    """Return tables of the losses at the starts and ends of documents.

    - ends: the separator at the end of a document.
    - starts: the first ids of a document after a start token.
    - bare: the same ids without a start token.
    - start_cost: `starts` minus `bare`.
    """
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
    """Return tables of the log-probabilities of the last words of passages.

    - whole: the input is the passage without the last word.
    - sentence: the input is only the last sentence of the passage, without the last word.
    - gain: `whole` minus `sentence`.

    Passages with more than `longest` input ids are omitted.
    """
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
    """Return the mean of clustered values with standard error, and the cluster count.

    Values of the same cluster may depend on each other. If there is only one cluster, the standard error is infinite.
    """
    _, cluster = np.unique(cluster, return_inverse=True)
    mean, counts = values.mean(), np.bincount(cluster)
    if len(counts) < 2:
        return Estimate(float(mean), math.inf), len(counts)
    residuals = np.bincount(cluster, values) - mean * counts
    spread = math.sqrt((residuals**2).sum() * len(counts) / (len(counts) - 1))
    return Estimate(float(mean), spread / len(values)), len(counts)


def position_edges(window: int) -> list[int]:
    """Return the edges that divide the positions of a window into ranges."""
    sixteenth = max(1, window // 16)
    doubled = [2**power for power in range(window.bit_length()) if 2**power < sixteenth]
    # Code that shifts labels inside rows of `window` ids never trains the last position, so it is a separate range.
    return sorted({0, *doubled, *range(sixteenth, window, sixteenth), window - 1, window})


def find_jump(full: Any, edges: Sequence[int]) -> Jump | None:
    """Return the first position at which the model's loss jumps, or None.

    At a jump, the model's loss and the loss difference (model minus baseline) become larger.

    Args:
        full: the targets of rows that fill the window.
        edges: the positions to test.
    """
    if not len(full):
        return None
    window, first = edges[-1], max(edge for edge in edges if edge <= SKIPPED)
    ours, theirs, document = (values.reshape(-1, window) for values in (full.ours, full.theirs, full.document))

    def rise(losses: NDArray[np.float64], start: int, middle: int, end: int) -> Estimate:
        """Return the mean loss at positions middle:end minus the mean at start:middle."""
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

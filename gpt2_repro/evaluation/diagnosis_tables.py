"""Average two models' losses over groups of tokens."""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpt2_repro.evaluation.diagnosis_rows import EDGE_TOKENS, Losses, Row


PER_MILLION = (1000, 100, 10, 1)  # limits between frequent and rare tokens, in occurrences per million tokens


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A mean and its standard error, or None for the error of a single document."""

    value: float
    stderr: float | None


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Mean losses or log-probabilities of two models on a group of tokens, in nats."""

    label: str
    tokens: int
    documents: int
    ours: float
    theirs: float
    difference: Estimate


Tables = dict[str, list[Bucket]]


def loss_tables(
    rows: Sequence[Row],
    losses: Sequence[Losses],
    *,
    names: Sequence[str],
    window: int,
    counts: NDArray[np.int64] | None,
) -> Tables:
    """Return the tables of diagnosis.json.

    Args:
        losses: the model's losses on all rows, and the baseline's losses on all rows.
        names: the names of the domains (kinds of text).
        window: the largest number of targets (ids to predict) in a row.
        counts: how often each id occurs in the training text, of shape [vocabulary]. If None, the ids in `rows` are
            counted instead.
    """
    everything = join(rows, losses)
    targets = everything[everything.part == "text"]
    # Only full rows, so that all positions are compared on the same rows.
    full = targets[np.bincount(targets.row)[targets.row] == window]
    return {
        "domains": buckets(targets, targets.domain, names),
        "positions": by_place(full, full.position, position_edges(window)),
        "frequencies": by_frequency(targets, np.bincount(targets.token) if counts is None else counts),
        **document_edges(everything),
        **last_words(rows, losses, names),
    }


def join(rows: Sequence[Row], losses: Sequence[Losses]) -> Any:
    """Return a record array: position of the input id, and both models' loss, per target."""
    sizes = [len(row.ids) - 1 for row in rows]
    fields = {name: np.repeat([getattr(row, name) for row in rows], sizes) for name in ("part", "domain", "document")}
    fields["row"] = np.repeat(np.arange(len(rows)), sizes)
    fields["position"] = np.concatenate([np.arange(size) for size in sizes])
    fields["token"] = np.concatenate([row.ids[1:] for row in rows], dtype=np.int64)
    ours, theirs = (np.concatenate(of_model, dtype=np.float64) for of_model in losses)
    return records(**fields, ours=ours, theirs=theirs)


def records(**arrays: NDArray[Any]) -> Any:
    """Combine arrays of equal length into a record array with one field per array."""
    return np.rec.fromarrays(list(arrays.values()), dtype=[(name, array.dtype) for name, array in arrays.items()])


def buckets(targets: Any, group: NDArray[Any], labels: Sequence[str]) -> list[Bucket]:
    """Return a bucket for each group with targets. `group` indexes `labels`."""
    rows = []
    for number, label in enumerate(labels):
        chosen = targets[group == number]
        if len(chosen):
            difference, documents = clustered(chosen.ours - chosen.theirs, chosen.document)
            means = float(chosen.ours.mean()), float(chosen.theirs.mean())
            rows.append(Bucket(label, len(chosen), documents, *means, difference))
    return rows


def by_place(targets: Any, place: NDArray[np.int64], edges: Sequence[int]) -> list[Bucket]:
    """Return a bucket per range of positions. `edges`: first positions, and the end."""
    labels = [f"{low:,}" if low + 1 == high else f"{low:,} to {high - 1:,}" for low, high in itertools.pairwise(edges)]
    return buckets(targets, np.searchsorted(edges, place, side="right") - 1, labels)


def by_frequency(targets: Any, counts: NDArray[np.int64]) -> list[Bucket]:
    """Return a bucket per range of frequencies. `counts`: occurrences of each id."""
    per_million = counts[targets.token] * 1e6 / counts.sum()
    between = [f"{low:,} to {high:,}" for high, low in itertools.pairwise(PER_MILLION)]
    group = len(PER_MILLION) - np.searchsorted(PER_MILLION[::-1], per_million, side="right")
    return buckets(targets, group, [f"{PER_MILLION[0]:,} and more", *between, "under 1"])


def document_edges(targets: Any) -> Tables:
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


def last_words(rows: Sequence[Row], losses: Sequence[Losses], names: Sequence[str]) -> Tables:
    """Return tables of the log-probabilities of the last words of passages.

    - whole: the input is the passage without the last word.
    - sentence: the input is only the last sentence of the passage, without the last word.
    - gain: `whole` minus `sentence`.
    """
    numbers = [number for number, row in enumerate(rows) if row.part == "words"]
    words = np.array([[-of_model[number][-rows[number].targets :].sum() for number in numbers] for of_model in losses])
    whole, sentence = words[:, ::2], words[:, 1::2]
    domain = np.array([rows[number].domain for number in numbers[::2]])
    tables = {}
    for name, (ours, theirs) in {"whole": whole, "sentence": sentence, "gain": whole - sentence}.items():
        tables[name] = buckets(records(ours=ours, theirs=theirs, document=np.arange(len(domain))), domain, names)
    return tables


def clustered(values: NDArray[np.floating[Any]], cluster: NDArray[np.int64]) -> tuple[Estimate, int]:
    """Return the mean of clustered values with standard error, and the cluster count."""
    _, cluster = np.unique(cluster, return_inverse=True)
    mean, counts = values.mean(), np.bincount(cluster)
    if len(counts) < 2:
        return Estimate(float(mean), None), len(counts)
    residuals = np.bincount(cluster, values) - mean * counts
    spread = math.sqrt((residuals**2).sum() * len(counts) / (len(counts) - 1))
    return Estimate(float(mean), spread / len(values)), len(counts)


def position_edges(window: int) -> list[int]:
    """Return the edges that divide the positions of a window into ranges."""
    sixteenth = max(1, window // 16)
    doubled = [2**power for power in range(window.bit_length()) if 2**power < sixteenth]
    # Code that shifts labels inside rows of `window` ids never trains the last position, so it is a separate range.
    return sorted({0, *doubled, *range(sixteenth, window, sixteenth), window - 1, window})

"""Average two models' losses over groups of tokens."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpt2_repro.evaluation.diagnosis_rows import EDGE_TOKENS, Counts, Losses, Row


PER_MILLION = (1000, 100, 10, 1)  # limits between frequent and rare tokens, in occurrences per million tokens


Bucket = dict[str, Any]  # a row of a table; see `buckets`


def loss_tables(
    rows: Sequence[Row], losses: Sequence[Losses], *, names: Sequence[str], window: int, counts: Counts | None
) -> dict[str, list[Bucket]]:
    """Return the tables of diagnosis.json (see comparison.DIAGNOSIS_TABLES).

    Args:
        losses: the model's losses on all rows, and the baseline's losses on all rows.
        names: the names of the domains (kinds of text).
        window: the largest number of targets (ids to predict) in a row.
        counts: how often each id occurs in the training text, of shape [vocabulary]. If None, the ids in `rows` are
            counted instead.
    """
    targets = join(rows, losses)
    text, starts, bare, ends = (targets[targets.part == part] for part in ("text", "starts", "bare", "ends"))
    # Only full rows, so that all positions are compared on the same rows.
    full = text[np.bincount(text.row)[text.row] == window]
    ends = ends[ends.position == ends.position.max(initial=0)]
    count = starts.position.max(initial=0) + 1
    edges = [*(2**power for power in range(EDGE_TOKENS.bit_length()) if 2**power <= count), count + 1]
    cost = starts[starts.position > 0]
    cost.ours -= bare.ours
    cost.theirs -= bare.theirs
    return {
        "domains": buckets(text, text.domain, names),
        "positions": by_place(full, full.position, position_edges(window)),
        "frequencies": by_frequency(text, np.bincount(text.token) if counts is None else counts),
        "ends": buckets(ends, np.zeros(len(ends)), ["the separator"]),
        "starts": by_place(starts, starts.position + 1, edges),
        "bare": by_place(bare, bare.position + 2, edges),
        "start_cost": buckets(cost, np.zeros(len(cost)), ["all but the first"]),
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
    """Return mean losses, in nats, and their difference for each group with targets. `group` indexes `labels`."""
    rows = []
    for number, label in enumerate(labels):
        chosen = targets[group == number]
        if len(chosen):
            mean, stderr, documents = clustered(chosen.ours - chosen.theirs, chosen.document)
            bucket = {"label": label, "tokens": len(chosen), "documents": documents}
            bucket |= {"ours": float(chosen.ours.mean()), "theirs": float(chosen.theirs.mean())}
            rows.append(bucket | {"difference": {"value": mean, "stderr": stderr}})
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


def last_words(rows: Sequence[Row], losses: Sequence[Losses], names: Sequence[str]) -> dict[str, list[Bucket]]:
    """Return tables of the log-probabilities of the last words of passages.

    - whole: the input is the passage without the last word.
    - sentence: the input is only the last sentence of the passage, without the last word.
    - gain: `whole` minus `sentence`.
    """
    numbers = [number for number, row in enumerate(rows) if row.part == "words"]
    words = np.array([[-of_model[number][-rows[number].targets :].sum() for number in numbers] for of_model in losses])
    whole, sentence = words[:, ::2], words[:, 1::2]
    domain = np.array([rows[number].domain for number in numbers[::2]])
    return {
        name: buckets(records(ours=ours, theirs=theirs, document=np.arange(len(domain))), domain, names)
        for name, (ours, theirs) in {"whole": whole, "sentence": sentence, "gain": whole - sentence}.items()
    }


def clustered(values: NDArray[np.floating[Any]], cluster: NDArray[np.int64]) -> tuple[float, float | None, int]:
    """Return mean, standard error (None for a single cluster) and number of clusters of clustered values."""
    _, cluster = np.unique(cluster, return_inverse=True)
    mean, counts = values.mean(), np.bincount(cluster)
    residuals = np.bincount(cluster, values) - mean * counts
    spread = math.sqrt((residuals**2).sum() * len(counts) / max(1, len(counts) - 1))
    return float(mean), spread / len(values) if len(counts) > 1 else None, len(counts)


def position_edges(window: int) -> list[int]:
    """Return the edges that divide the positions of a window into ranges."""
    sixteenth = max(1, window // 16)
    doubled = [2**power for power in range(window.bit_length()) if 2**power < sixteenth]
    # Code that shifts labels inside rows of `window` ids never trains the last position, so it is a separate range.
    return sorted({0, *doubled, *range(sixteenth, window, sixteenth), window - 1, window})

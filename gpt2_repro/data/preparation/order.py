"""The order of documents and their split: a function of their lengths alone."""

import collections
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from gpt2_repro.data.preparation.tokenizing import StagedPart


@dataclasses.dataclass(frozen=True)
class DocumentSpan:
    """Documents of one part that follow each other and go to one split.

    Args:
        stream, part: numbers of the stream and of its part.
        first_document, first_token: how many of the part come before it.
        lengths: of the documents [documents], in tokens.
        split: the name of the split.
    """

    stream: int
    part: int
    first_document: int
    first_token: int
    lengths: np.ndarray
    split: str


# What is known of each document: where it starts, whether a hash holds it out, its length, the tokens of its part
# before it, its stream, its part and its number in the part.
_DOCUMENT = np.dtype(
    [("start", float), ("held_out", bool)]
    + [(name, np.int64) for name in ("length", "first_token", "stream", "part", "number")]
)


def order_documents(
    streams: Sequence[Sequence[StagedPart]],
    weights: Sequence[float],
    splits: Sequence[str],
    *,
    head: float | None = np.inf,
    below: float = np.inf,
) -> Iterator[DocumentSpan]:
    """Yield the documents of all streams in order, as spans.

    A document stands where it starts: at the tokens before it in its stream, divided by the stream's weight. So each
    stream has its share of every stretch, and of documents that start together the first stream's comes first.

    Args:
        streams: parts of each stream, in order.
        weights: of the streams, summing to 1.
        splits: names of one split that takes all, or of two: the one that is held out and the rest.
        head: documents that start before it go to the first split; None leaves that to the hash.
        below: documents that start here or later are left out.
    """
    numbered = enumerate(zip(streams, weights, strict=True))
    loading = [_documents(parts, weight, number, hashed=head is None) for number, (parts, weight) in numbered]
    waiting = [np.empty(0, _DOCUMENT) for _ in streams]
    ends = [0.0] * len(streams)  # where the next part of each stream starts
    while (known := min(ends)) < below:
        behind = ends.index(known)
        loaded, ends[behind] = next(loading[behind], (waiting[behind][:0], np.inf))
        waiting[behind] = np.concatenate([waiting[behind], loaded])
        # All documents that start before the earliest of the next parts are loaded.
        counts = [int(np.searchsorted(of_stream["start"], min(ends))) for of_stream in waiting]
        documents = np.concatenate([of_stream[:count] for of_stream, count in zip(waiting, counts, strict=True)])
        waiting = [of_stream[count:] for of_stream, count in zip(waiting, counts, strict=True)]
        if len(streams) > 1:
            documents = documents[np.lexsort((documents["stream"], documents["start"]))]
        documents = documents[documents["start"] < below]
        held_out = documents["held_out"] if head is None else documents["start"] < head
        yield from _spans(documents, np.where(held_out, 0, len(splits) - 1), splits)


def _documents(
    parts: Sequence[StagedPart], weight: float, stream: int, *, hashed: bool
) -> Iterator[tuple[np.ndarray, float]]:
    """Yield the documents of each part, and where the next part starts."""
    tokens = 0
    for number, part in enumerate(parts):
        lengths = part.lengths()
        found = np.zeros(len(lengths), _DOCUMENT)
        found["length"], found["first_token"] = lengths, np.cumsum(lengths) - lengths
        found["start"] = (tokens + found["first_token"]) / weight
        found["stream"], found["part"], found["number"] = stream, number, np.arange(len(lengths))
        if hashed:
            found["held_out"] = part.held_out()
        tokens += int(lengths.sum())
        yield found, tokens / weight


def _spans(documents: np.ndarray, codes: np.ndarray, splits: Sequence[str]) -> Iterator[DocumentSpan]:
    same = [np.diff(values) == 0 for values in (documents["stream"], documents["part"], codes)]
    follows = np.logical_and.reduce([np.diff(documents["number"]) == 1, *same])
    edges = [0, *(np.flatnonzero(~follows) + 1).tolist(), len(codes)] if len(codes) else []
    for first, last in itertools.pairwise(edges):
        stream, part, number, token = (
            int(documents[name][first]) for name in ("stream", "part", "number", "first_token")
        )
        yield DocumentSpan(stream, part, number, token, documents["length"][first:last], splits[codes[first]])


def count_documents(spans: Iterable[DocumentSpan]) -> dict[tuple[str, int], collections.Counter[str]]:
    """Count documents, empty documents and tokens of each split and stream."""
    counts: dict[tuple[str, int], collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for span in spans:
        empty = int((span.lengths == 0).sum())
        full = len(span.lengths) - empty
        counts[span.split, span.stream].update(documents=full, empty_documents=empty, tokens=int(span.lengths.sum()))
    return counts

"""The order of documents and their split: a function of their lengths alone. Pure: arrays in, runs out."""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np


class Lengths(Protocol):
    """What is asked of a part: the length of each document [documents], and whether a hash holds it out."""

    def lengths(self) -> np.ndarray: ...
    def held_out(self) -> np.ndarray: ...


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


def runs(
    streams: Sequence[Sequence[Lengths]],
    weights: Sequence[float],
    splits: Sequence[str],
    *,
    head: float | None = np.inf,
    below: float = np.inf,
) -> Iterator[DocumentSpan]:
    """The documents of all streams in order, as runs.

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
    cursors = [_Cursor(parts, weight, number, hashed=head is None) for number, (parts, weight) in numbered]
    while any([cursor.load() for cursor in cursors]):
        # Up to here every stream's documents are known; one stream alone needs no such line.
        known = min((cursor.documents["start"][-1] for cursor in cursors if cursor.more), default=np.inf)
        documents = np.concatenate([cursor.take(known) for cursor in cursors])
        if len(cursors) > 1:
            documents = documents[np.lexsort((documents["stream"], documents["start"]))]
        documents = documents[documents["start"] < below]
        held_out = documents["held_out"] if head is None else documents["start"] < head
        yield from _group(documents, np.where(held_out, 0, len(splits) - 1), splits)


def _group(documents: np.ndarray, codes: np.ndarray, splits: Sequence[str]) -> Iterator[DocumentSpan]:
    follows = (np.diff(documents["number"]) == 1) & (np.diff(codes) == 0)
    for name in ("part", "stream"):
        follows &= np.diff(documents[name]) == 0
    edges = [0, *(np.flatnonzero(~follows) + 1).tolist(), len(codes)]
    for first, last in itertools.pairwise(edges):
        if first < last:
            stream, part, number, token = (
                int(documents[name][first]) for name in ("stream", "part", "number", "first_token")
            )
            yield DocumentSpan(stream, part, number, token, documents["length"][first:last], splits[codes[first]])


class _Cursor:
    """How far a stream has been taken."""

    def __init__(self, parts: Sequence[Lengths], weight: float, number: int, *, hashed: bool) -> None:
        self._parts, self._weight, self._number, self._hashed = parts, weight, number, hashed
        self._next = self._tokens = 0
        self.documents = np.empty(0, _DOCUMENT)

    @property
    def more(self) -> bool:
        return self._next < len(self._parts)

    def load(self) -> bool:
        """Have documents at hand, if any are left."""
        while not len(self.documents) and self.more:
            part = self._parts[self._next]
            lengths = part.lengths()
            self.documents = found = np.zeros(len(lengths), _DOCUMENT)
            found["length"], found["first_token"] = lengths, np.cumsum(lengths) - lengths
            found["start"] = (self._tokens + found["first_token"]) / self._weight
            found["stream"], found["part"], found["number"] = self._number, self._next, np.arange(len(lengths))
            if self._hashed:
                found["held_out"] = part.held_out()
            self._tokens += int(lengths.sum())
            self._next += 1
        return bool(len(self.documents))

    def take(self, known: float) -> np.ndarray:
        """Those that start at `known` or before."""
        count = int(np.searchsorted(self.documents["start"], known, side="right"))
        taken, self.documents = self.documents[:count], self.documents[count:]
        return taken


def count(found: Iterable[DocumentSpan]) -> dict[tuple[str, int], dict[str, int]]:
    """Documents, empty ones apart, and tokens, of each split and stream."""
    counts: dict[tuple[str, int], dict[str, int]] = {}
    for run in found:
        of_split = counts.setdefault((run.split, run.stream), {"documents": 0, "empty_documents": 0, "tokens": 0})
        empty = int((run.lengths == 0).sum())
        of_split["documents"] += len(run.lengths) - empty
        of_split["empty_documents"] += empty
        of_split["tokens"] += int(run.lengths.sum())
    return counts

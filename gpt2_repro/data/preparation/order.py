"""The order of documents and their split: a function of their lengths alone. Pure: arrays in, runs out."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np


class Lengths(Protocol):
    """What is asked of a part: the length of each document [documents], and whether a hash holds it out."""

    def lengths(self) -> np.ndarray: ...
    def held_out(self) -> np.ndarray: ...


@dataclasses.dataclass(frozen=True)
class Run:
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

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())


# Of documents, by where they start [documents] and whether the hash holds them out [documents] or None: numbers of the
# splits [documents], -1 for those that are left out.
Assign = Callable[[np.ndarray, np.ndarray | None], np.ndarray]


def runs(
    streams: Sequence[Sequence[Lengths]],
    weights: Sequence[float],
    splits: Sequence[str],
    assign: Assign,
    *,
    hashed: bool,
) -> Iterator[Run]:
    """The documents of all streams in order, as runs.

    A document stands where it starts: at the tokens before it in its stream, divided by the stream's weight. So each
    stream has its share of every stretch, and of documents that start together the first stream's comes first.

    Args:
        streams: parts of each stream, in order.
        weights: of the streams, summing to 1.
        splits: names that `assign`'s numbers mean.
        hashed: whether parts tell which documents a hash holds out.
    """
    pairs = enumerate(zip(streams, weights, strict=True))
    places = [_Place(parts, weight, number, hashed) for number, (parts, weight) in pairs]
    while any([place.load() for place in places]):
        # Up to here every stream's documents are known; one stream alone needs no such line.
        known = min((place.starts[-1] for place in places if place.more), default=np.inf)
        taken = [place.take(known) for place in places]
        columns = [np.concatenate(arrays) for arrays in zip(*taken, strict=True)]
        if len(places) > 1:
            order = np.lexsort((columns[_STREAM], columns[_START]))
            columns = [column[order] for column in columns]
        codes = assign(columns[_START], columns[_HELD_OUT] if hashed else None)
        yield from _group(splits, codes, columns)


_START, _HELD_OUT, _LENGTH, _FIRST_TOKEN, _STREAM, _PART, _DOCUMENT = range(7)  # what is known of each document


def _group(splits: Sequence[str], codes: np.ndarray, columns: Sequence[np.ndarray]) -> Iterator[Run]:
    follows = np.diff(columns[_DOCUMENT]) == 1
    for column in (columns[_PART], columns[_STREAM], codes):
        follows &= np.diff(column) == 0
    edges = [0, *(np.flatnonzero(~follows) + 1).tolist(), len(codes)]
    for first, last in zip(edges[:-1], edges[1:], strict=True):
        if first < last and codes[first] >= 0:
            stream, part, document, token = (
                int(columns[name][first]) for name in (_STREAM, _PART, _DOCUMENT, _FIRST_TOKEN)
            )
            yield Run(stream, part, document, token, columns[_LENGTH][first:last], splits[codes[first]])


class _Place:
    """How far a stream has been taken."""

    def __init__(self, parts: Sequence[Lengths], weight: float, number: int, hashed: bool) -> None:
        self._parts, self._weight, self._number, self._hashed = parts, weight, number, hashed
        self._next = self._tokens = 0
        self.starts = np.empty(0)
        self._rest: tuple[np.ndarray, ...] = (np.empty(0, bool), *(np.empty(0, np.int64) for _ in range(5)))

    @property
    def more(self) -> bool:
        return self._next < len(self._parts)

    def load(self) -> bool:
        """Have documents at hand, if any are left."""
        while not len(self.starts) and self.more:
            part = self._parts[self._next]
            lengths = part.lengths()
            first_tokens = np.cumsum(lengths) - lengths
            self.starts = (self._tokens + first_tokens) / self._weight
            held_out = part.held_out() if self._hashed else np.zeros(len(lengths), bool)
            same = (np.full(len(lengths), number) for number in (self._number, self._next))
            self._rest = (held_out, lengths, first_tokens, *same, np.arange(len(lengths)))
            self._tokens += int(lengths.sum())
            self._next += 1
        return bool(len(self.starts))

    def take(self, known: float) -> tuple[np.ndarray, ...]:
        """Those that start at `known` or before."""
        count = int(np.searchsorted(self.starts, known, side="right"))
        taken = (self.starts[:count], *(array[:count] for array in self._rest))
        self.starts, self._rest = self.starts[count:], tuple(array[count:] for array in self._rest)
        return taken


def all_to(number: int, below: float = np.inf) -> Assign:
    """Everything that starts before `below` to one split."""
    return lambda starts, _: np.where(starts < below, number, -1)


def head_to(number: int, tokens: int, rest: int, below: float) -> Assign:
    """The first `tokens` by whole documents to one split, the rest to another."""
    return lambda starts, _: np.where(starts < below, np.where(starts < tokens, number, rest), -1)


def held_out_to(number: int, rest: int, below: float) -> Assign:
    """What the hash holds out to one split, the rest to another."""
    return lambda starts, held_out: np.where(starts < below, np.where(np.asarray(held_out), number, rest), -1)


def count(found: Iterable[Run]) -> dict[tuple[str, int], dict[str, int]]:
    """Documents, empty ones apart, and tokens, of each split and stream."""
    counts: dict[tuple[str, int], dict[str, int]] = {}
    for run in found:
        of_split = counts.setdefault((run.split, run.stream), {"documents": 0, "empty_documents": 0, "tokens": 0})
        empty = int((run.lengths == 0).sum())
        of_split["documents"] += len(run.lengths) - empty
        of_split["empty_documents"] += empty
        of_split["tokens"] += run.tokens
    return counts

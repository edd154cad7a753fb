"""Which files a preparation stages, in which order their documents stand, and to which split each goes.

The order and the split are a function of the documents' lengths alone, or of a hash of the text.
"""

import collections
import dataclasses
import functools
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from gpt2_repro.data.arguments import DataArguments
from gpt2_repro.data.preparation.tokenizing import StagedPart
from gpt2_repro.data.preparation.workers import Stream
from gpt2_repro.data.sources.opening import Sources
from gpt2_repro.errors import UserError


logger = logging.getLogger(__name__)

SPLITS = ["validation", "train"]
MOST_HELD_OUT = 0.1  # of the tokens, by the split head
FEW_DOCUMENTS = 10_000  # of so few the split hash may hold out none, or all


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


@dataclasses.dataclass(frozen=True)
class Group:
    """Splits that are made of the same streams.

    Args:
        splits: their names, in the order in which they are written.
        streams: the staged parts of each stream.
        names: of the streams' sources.
        spans: yields the documents of all streams in order, from the first one at each call.
    """

    splits: list[str]
    streams: list[list[StagedPart]]
    names: list[str]
    spans: Callable[[], Iterator[DocumentSpan]]


def check_split(args: DataArguments, sources: Sources) -> None:
    """Raise UserError if a source cannot be split as asked for, or a document would be in two places."""
    trained: set[tuple[str, ...]] = set()
    for source in sources.training:
        name = source.description["name"]
        tokens = any(file.name.endswith(".bin") for file in source.files)
        if not source.files:
            raise UserError(f"{name} has validation files alone: name training files too")
        if args.split == "source" and not source.validation_files:
            raise UserError(f"{name} has no validation files (named `val` or `validation`): pass --split head or hash")
        if args.split == "head" and tokens and source.validation_files:
            raise UserError(f"{name} brings its own validation tokens: add --split source")
        if args.split == "hash" and tokens:
            raise UserError(f"{name} holds tokens, and the split hash is of text: use --split source or --split head")
        if args.validation_text and tokens:
            raise UserError(f"{name} holds tokens, no text to write down: leave out --validation_text")
        files = {file.identity(): file.name for file in source.files}
        if twice := files.keys() & trained:
            raise UserError(f"two sources of the mixture hold {files[min(twice)]}: name it once")
        trained |= files.keys()
    of_training = [source.description["name"] for source in sources.training]
    for name, source in sources.validation_sets.items():
        hold = f"the validation set {name} would hold what is trained on"
        for file in source.validation_files or source.files:
            if file.identity() in trained:
                raise UserError(f"{hold}, {file.name}: name another")
        if source.description["name"] in of_training and not (source.validation_files and args.split != "source"):
            raise UserError(f"{hold}: name another source")


def streams_of(sources: Sources, args: DataArguments) -> tuple[list[Stream], list[Stream], list[Stream]]:
    """The streams of training, those of the sources' own validation files if they are used, those of further sets."""
    texts, by_source = args.validation_text, args.split == "source"
    numbered = list(enumerate(sources.training))
    limits = [int(args.max_tokens * source.weight) + 1 if args.max_tokens else 0 for source in sources.training]
    train = [Stream(f"train-{i}", source.files, limits[i], texts and not by_source) for i, source in numbered]
    own = [Stream(f"validation-{i}", source.validation_files, keep_texts=texts) for i, source in numbered if by_source]
    further = [
        Stream(f"validation_{name}", source.validation_files or source.files, args.validation_tokens)
        for name, source in sources.validation_sets.items()
    ]
    return train, own, further


def stage_groups(sources: Sources, args: DataArguments, stage: Callable[[Stream], list[StagedPart]]) -> list[Group]:
    """Stage all streams, and split their documents. A mixture ends with the source that ends first."""
    training, own, further = streams_of(sources, args)
    names = [source.description["name"] for source in sources.training]
    weights = [source.weight for source in sources.training]
    train: list[list[StagedPart]] = [[] for _ in training]
    below = float(args.max_tokens or np.inf)
    # The source that seems to end first comes first: of the others no more is staged than goes with it.
    for i in sorted(range(len(names)), key=lambda i: sum(file.size for file in training[i].files) / weights[i]):
        limit = 0 if below == np.inf else int(below * weights[i]) + 1
        train[i] = stage(dataclasses.replace(training[i], limit=limit))
        if len(names) > 1:
            below = min(below, sum(part.facts["tokens"] for part in train[i]) / weights[i])
    ordered = functools.partial(order_documents, train, weights, below=below)
    if args.split == "source":
        staged = [stage(stream) for stream in own]
        groups = [
            Group(["validation"], staged, names, functools.partial(_in_turn, staged)),
            Group(["train"], train, names, functools.partial(ordered, ["train"])),
        ]
    else:
        tokens = [sum(part.facts["tokens"] for part in parts) for parts in train]
        total = min(below, *(count / weight for count, weight in zip(tokens, weights, strict=True)))
        both = functools.partial(ordered, SPLITS)
        if args.split == "head" or _hash_needs_cut(train, both, args):
            both = functools.partial(both, **_choose_head(both, args, total))
        else:
            both = functools.partial(both, head=None)
        groups = [Group(SPLITS, train, names, both)]
    for source, stream in zip(sources.validation_sets.values(), further, strict=True):
        parts = [stage(stream)]
        spans = functools.partial(order_documents, parts, [1.0], [stream.name], below=stream.limit)
        groups.append(Group([stream.name], parts, [source.description["name"]], spans))
    return groups


def _choose_head(order: Callable[..., Iterator[DocumentSpan]], args: DataArguments, total: float) -> dict[str, Any]:
    """Return the arguments of `order_documents` that hold out the beginning of `total` tokens, 10 % at most.

    The documents that start in it are held out whole if they are no more than 10 % together. Otherwise the documents
    at its end are cut in two.
    """
    wanted = args.validation_tokens if args.split == "head" else args.validation_fraction * total
    most = MOST_HELD_OUT * total
    head = min(wanted, most)
    if not total or (wanted <= most and sum(int(span.lengths.sum()) for span in order(head=head, below=head)) <= most):
        return {"head": head}
    less = f", not {wanted:,.0f}" if wanted > head else ""
    told = "validation: the first %s of %s tokens (%.1f %%), cut inside a document%s"
    logger.info(told, f"{head:,.0f}", f"{total:,.0f}", 100 * head / total, less)
    return {"head": head, "cut": True}


def _hash_needs_cut(
    train: list[list[StagedPart]], order: Callable[..., Iterator[DocumentSpan]], args: DataArguments
) -> bool:
    """Return whether the split hash leaves no whole row for one of the two sides, because there are few documents."""
    if sum(part.facts["documents"] for parts in train for part in parts) > FEW_DOCUMENTS:
        return False
    counts = count_documents(order(head=None))
    tokens = [sum(its["tokens"] for (split, _), its in counts.items() if split == name) for name in SPLITS]
    return min(tokens) <= args.sequence_length


def _in_turn(streams: list[list[StagedPart]]) -> Iterator[DocumentSpan]:
    """Yield the documents of one stream after the other, for validation."""
    for number, parts in enumerate(streams):
        for span in order_documents([parts], [1.0], ["validation"]):
            yield dataclasses.replace(span, stream=number)


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
    cut: bool = False,
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
        cut: documents that start before `head` and end after it are cut in two.
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
        if cut:
            documents = _cut_documents(documents, head or 0.0, np.array(weights))
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


def _cut_documents(documents: np.ndarray, place: float, weights: np.ndarray) -> np.ndarray:
    """Cut each document that contains the position `place` into two that follow each other."""
    tokens = np.rint((place - documents["start"]) * weights[documents["stream"]]).astype(np.int64)
    across = np.flatnonzero((tokens > 0) & (tokens < documents["length"]))
    rest, tokens = documents[across], tokens[across]
    rest["start"] = place
    rest["first_token"] += tokens
    rest["length"] -= tokens
    documents["length"][across] = tokens
    return np.insert(documents, across + 1, rest)


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

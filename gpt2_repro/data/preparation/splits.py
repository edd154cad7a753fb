"""Choose the files to tokenize, the order of documents and their splits.

The order depends only on the lengths of the documents and on the weights of the sources.
"""

import collections
import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from gpt2_repro.data.arguments import DataArguments
from gpt2_repro.data.preparation.staging import FEW_DOCUMENTS, StagedPart, Stream
from gpt2_repro.data.sources.opening import Sources
from gpt2_repro.errors import UserError


SPLITS = ["validation", "train"]
MOST_HELD_OUT = 0.1  # maximum share of the tokens that --split head holds out


@dataclasses.dataclass(frozen=True)
class DocumentSpan:
    """Consecutive documents that go to the same split, from one part of a source file."""

    stream: int  # index of the source
    part: int  # index of the file part among all parts of the source
    first_document: int  # number of documents in the file part before these documents
    first_token: int  # number of tokens in the file part before these documents
    lengths: np.ndarray  # [documents], in tokens
    split: str


@dataclasses.dataclass(frozen=True)
class Group:
    """One or two splits whose documents come from the same source files."""

    splits: list[str]
    streams: list[list[StagedPart]]  # for each source, the tokenized parts of its files
    names: list[str]  # of the sources
    spans: Callable[[], Iterator[DocumentSpan]]  # yields the documents of all sources in order
    remark: str = ""  # how the validation split differs from the requested split, if it does


def check_split(args: DataArguments, sources: Sources) -> None:
    """Raise UserError if a source does not support --split, or a file is used twice."""
    trained: set[tuple[str, ...]] = set()
    for source in sources.training:
        tokens, own = any(file.name.endswith(".bin") for file in source.files), source.validation_files
        for is_wrong, problem in (
            (not source.files, "has only validation files. Pass training files too"),
            (
                args.split == "source" and not own,
                "has no validation files (`val` in the name). Pass --split head or hash",
            ),
            (args.split == "head" and tokens and own, "has validation files. Pass --split source to use them"),
            (args.split == "hash" and tokens, "has tokens, but --split hash needs text. Pass --split source or head"),
            (args.validation_text and tokens, "has tokens, so there is no text to save. Pass --validation_text false"),
        ):
            if is_wrong:
                raise UserError(f"{source.description['name']} {problem}.")
        files = {file.identity(): file.name for file in source.files}
        if twice := files.keys() & trained:
            raise UserError(f"Two sources of the mixture contain {files[min(twice)]}. Pass this file only once.")
        trained |= files.keys()
    for name, source in sources.validation_sets.items():
        if any(file.identity() in trained for file in source.validation_files or source.files):
            raise UserError(f"The validation set {name!r} has text that is also in the training sources.")


def streams_of(sources: Sources, args: DataArguments) -> tuple[list[Stream], list[Stream], list[Stream]]:
    """Return the files for training, --split source and --validation_sets."""
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
    """Tokenize all sources, and group the splits that use the same source files."""
    training, validation, further = streams_of(sources, args)
    names = [source.description["name"] for source in sources.training]
    weights = [source.weight for source in sources.training]
    train: list[list[StagedPart]] = [[] for _ in training]
    below = float(args.max_tokens or np.inf)
    # A mixture ends as soon as one of its sources ends.
    # Stage the source first that will probably end first, and of the others only as much as the mixture can use.
    for i in sorted(range(len(names)), key=lambda i: sum(file.size for file in training[i].files) / weights[i]):
        limit = 0 if below == np.inf else int(below * weights[i]) + 1
        train[i] = stage(dataclasses.replace(training[i], limit=limit))
        if len(names) > 1:
            below = min(below, _tokens(train[i]) / weights[i])
    ordered = functools.partial(order_documents, train, weights, below=below)
    if args.split == "source":
        own = [stage(stream) for stream in validation]
        end = min(map(operator.truediv, map(_tokens, own), weights)) if len(own) > 1 else np.inf
        spans = functools.partial(order_documents, own, weights, ["validation"], below=end)
        groups = [
            Group(["validation"], own, names, spans),
            Group(["train"], train, names, functools.partial(ordered, ["train"])),
        ]
    else:
        total = min(below, *map(operator.truediv, map(_tokens, train), weights))
        both = functools.partial(ordered, SPLITS)
        documents = [sum(part.facts["documents"] for part in parts) for parts in train]
        few = [number for number, count in enumerate(documents) if count <= FEW_DOCUMENTS]
        if args.split == "hash":
            chosen, remark = _choose_by_hash(both, few, names, weights, args, total)
        else:
            chosen, remark = _choose_head(both, weights, args, total)
        groups = [Group(SPLITS, train, names, functools.partial(both, **chosen), remark)]
    for source, stream in zip(sources.validation_sets.values(), further, strict=True):
        parts = [stage(stream)]
        spans = functools.partial(order_documents, parts, [1.0], [stream.name], below=stream.limit)
        groups.append(Group([stream.name], parts, [source.description["name"]], spans))
    return groups


def _tokens(parts: list[StagedPart]) -> int:
    return sum(part.facts["tokens"] for part in parts)


def _choose_by_hash(
    order: Callable[..., Iterator[DocumentSpan]],
    few: list[int],
    names: list[str],
    weights: list[float],
    args: DataArguments,
    total: float,
) -> tuple[dict[str, Any], str]:
    """Choose the validation documents for --split hash, as `_choose_head` does.

    A source in `few` (with few documents) of which the hash holds out a wrong share is cut as by --split head.
    """
    every, tokens = range(len(weights)), args.validation_fraction * total
    if few:
        counts = count_documents(order(hashed=every))
        sizes = [[counts[split, number]["tokens"] for split in SPLITS] for number in every]
        enough = min(sizes[0]) > args.sequence_length
        few = [n for n in few if not (_has_share(sizes[n][0], weights[n] * tokens) if len(weights) > 1 else enough)]
    if not few:
        return {"hashed": every}, ""
    named, share = " and ".join(names[number] for number in few), f"the first {args.validation_fraction:.1%}"
    remark = f"--split hash has too few documents in {named}: validation has {share} of it, and may cut a document"
    return {"hashed": sorted({*every} - {*few}), "head": float(round(tokens)), "cut": True}, remark


def _has_share(tokens: float, wanted: float) -> bool:
    return abs(tokens - wanted) <= wanted / 4


def _choose_head(
    order: Callable[..., Iterator[DocumentSpan]], weights: list[float], args: DataArguments, total: float
) -> tuple[dict[str, Any], str]:
    """Choose the validation documents for --split head.

    Returns keyword arguments for `order_documents`, and a remark on the split. `total` is the number of all tokens.
    """
    wanted, most = float(args.validation_tokens), MOST_HELD_OUT * total
    head = float(round(min(wanted, most)))  # otherwise, a document that starts less than a token before it is included
    counts = count_documents(order(head=head, below=head))
    held_out = sum(count["tokens"] for count in counts.values())
    shares = [(counts["validation", number]["tokens"], weight * head) for number, weight in enumerate(weights)]
    even = len(weights) == 1 or all(itertools.starmap(_has_share, shares))
    # A document that starts in the head and ends after it goes to validation completely. But it is cut in two if
    # validation would otherwise have more than 10 % of all tokens, or not the shares of a mixture, or if more than
    # 10 % was requested.
    if not total or (wanted <= most and held_out <= most and even):
        return {"head": head}, ""
    less = f" instead of the {wanted:,.0f} that were requested" if wanted > head else ""
    share = f"the first {head:,.0f} of {total:,.0f} tokens ({head / total:.1%})"
    return {"head": head, "cut": True}, f"validation has {share}{less}. Its last document may be cut"


# Fields of a document: its position, whether it is held out, its length in tokens, the tokens before it in its
# part, its stream, its part, and its number within the part.
_DOCUMENT = np.dtype(
    [("start", float), ("held_out", bool)]
    + [(name, np.int64) for name in ("length", "first_token", "stream", "part", "number")]
)


def order_documents(
    streams: Sequence[Sequence[StagedPart]],
    weights: Sequence[float],
    splits: Sequence[str],
    *,
    head: float = np.inf,
    cut: bool = False,
    hashed: Collection[int] = (),
    below: float = np.inf,
) -> Iterator[DocumentSpan]:
    """Yield the documents of all sources in order.

    Documents are sorted by position: the number of earlier tokens of the same source, divided by the source's weight.

    Args:
        weights: share of each source in the tokens; the sum is 1.
        splits: the split of all documents, or two splits: validation, and the split of all other documents.
        head: position at which validation ends.
        cut: whether to cut documents in two at the position `head`.
        hashed: numbers of the sources whose validation documents --split hash chooses, instead of `head`.
        below: yield only documents whose position is below this number.
    """
    numbered = enumerate(zip(streams, weights, strict=True))
    loading = [_documents(parts, weight, i, None if i in hashed else head) for i, (parts, weight) in numbered]
    waiting = [np.empty(0, _DOCUMENT) for _ in streams]
    ends = [0.0] * len(streams)  # position of the next part of each stream
    while (known := min(ends)) < below:
        behind = ends.index(known)
        loaded, ends[behind] = next(loading[behind], (waiting[behind][:0], np.inf))
        waiting[behind] = np.concatenate([waiting[behind], loaded])
        # All documents before the earliest next part are loaded now.
        counts = [int(np.searchsorted(held["start"], min(ends))) for held in waiting]
        documents = np.concatenate([held[:count] for held, count in zip(waiting, counts, strict=True)])
        waiting = [held[count:] for held, count in zip(waiting, counts, strict=True)]
        if len(streams) > 1:
            documents = documents[np.lexsort((documents["stream"], documents["start"]))]
        documents = documents[documents["start"] < below]
        if cut:
            documents = _cut_documents(documents, head, np.array(weights), hashed)
        yield from _spans(documents, np.where(documents["held_out"], 0, len(splits) - 1), splits)


def _documents(
    parts: Sequence[StagedPart], weight: float, stream: int, head: float | None
) -> Iterator[tuple[np.ndarray, float]]:
    """For each file part, yield its documents and the position of the part's end.

    A position is a number of tokens from the start of the source, divided by `weight`. Documents before the position
    `head` are held out. If `head` is None, --split hash chooses the documents.
    """
    tokens = 0
    for number, part in enumerate(parts):
        lengths = part.lengths()
        documents = np.zeros(len(lengths), _DOCUMENT)
        documents["length"], documents["first_token"] = lengths, np.cumsum(lengths) - lengths
        documents["start"] = (tokens + documents["first_token"]) / weight
        documents["stream"], documents["part"], documents["number"] = stream, number, np.arange(len(lengths))
        documents["held_out"] = part.held_out() if head is None else documents["start"] < head
        tokens += int(lengths.sum())
        yield documents, tokens / weight


def _cut_documents(documents: np.ndarray, place: float, weights: np.ndarray, whole: Collection[int]) -> np.ndarray:
    """Cut each document that contains the position `place` into two, except those of the sources `whole`.

    Returns a new array of the dtype `_DOCUMENT`.
    """
    tokens = np.rint((place - documents["start"]) * weights[documents["stream"]]).astype(np.int64)
    is_cut = (tokens > 0) & (tokens < documents["length"]) & ~np.isin(documents["stream"], list(whole))
    across = np.flatnonzero(is_cut)
    rest, tokens = documents[across], tokens[across]
    rest["start"], rest["held_out"] = place, False
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
    """Count documents, empty documents and tokens per split and source."""
    counts: dict[tuple[str, int], collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for span in spans:
        empty = int((span.lengths == 0).sum())
        full = len(span.lengths) - empty
        counts[span.split, span.stream].update(documents=full, empty_documents=empty, tokens=int(span.lengths.sum()))
    return counts

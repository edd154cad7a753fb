"""Choose the files to tokenize, the order of documents and their splits.

The order depends only on the lengths of the documents and on the weights of the sources.
"""

import dataclasses
import itertools
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import numpy as np

from gpt2_repro.data.arguments import DataArguments, PreparationOptions
from gpt2_repro.data.preparation.staging import Stream, stage
from gpt2_repro.data.sources.opening import Sources
from gpt2_repro.data.sources.token_files import TOKENS
from gpt2_repro.errors import UserError


SPLITS = ["validation", "train"]
FEW_DOCUMENTS = 10_000  # of so few, --split hash may hold out far too few or too many
COUNTED = ("documents", "empty_documents", "tokens")
MOST_HELD_OUT = 0.1  # maximum share of the tokens that --split head holds out
# Fields of a document: its position, whether it is held out, its length in tokens, the tokens before it in its
# part, its stream, its part, and its number within the part.
_NUMBERS = ("length", "first_token", "stream", "part", "number")
_DOCUMENT = np.dtype([("start", float), ("held_out", bool), *((name, np.int64) for name in _NUMBERS)])


@dataclasses.dataclass(frozen=True)
class DocumentSpan:
    """Consecutive documents that go to the same split, from one part of a source file."""

    stream: int  # index of the source
    part: int  # index of the file part among all parts of the source
    first_document: int  # number of documents in the file part before these documents
    first_token: int  # number of tokens in the file part before these documents
    lengths: np.ndarray  # [documents], in tokens
    split: str


@dataclasses.dataclass
class Group:
    """One or two splits whose documents come from the same source files."""

    splits: list[str]  # of two splits, the first one is validation, and the second one has all other documents
    streams: list[Stream]  # one for each source
    below: float = np.inf  # position at which the splits end
    head: float = np.inf  # position at which validation ends
    cut: bool = False  # whether to cut documents in two at the position `head`
    hashed: Collection[int] = ()  # sources whose validation documents --split hash chooses, instead of `head`
    remark: str = ""  # how the validation split differs from the requested split, if it does

    def spans(self) -> Iterator[DocumentSpan]:
        """Yield the documents of all sources in order.

        Documents are sorted by position: the number of earlier tokens of the same source, divided by the source's
        weight.
        """
        streams = self.streams
        weights = np.array([stream.weight for stream in streams])
        loading = [_documents(stream, i, None if i in self.hashed else self.head) for i, stream in enumerate(streams)]
        waiting = np.empty(0, _DOCUMENT)
        ends = [0.0] * len(streams)  # position of the next part of each stream
        while (known := min(ends)) < self.below:
            behind = ends.index(known)
            loaded, ends[behind] = next(loading[behind], (waiting[:0], np.inf))
            waiting = np.concatenate([waiting, loaded])
            if len(streams) > 1:
                waiting = waiting[np.lexsort((waiting["stream"], waiting["start"]))]
            # All documents before the earliest next part are loaded now.
            ready = np.searchsorted(waiting["start"], min(self.below, *ends))
            documents, waiting = waiting[:ready], waiting[ready:]
            if self.cut:
                documents = _cut_documents(documents, self.head, weights, self.hashed)
            yield from _spans(documents, self.splits)

    def counts(self) -> dict[str, list[dict[str, int]]]:
        """Count documents, empty documents and tokens per split and source."""
        counts = {split: [dict.fromkeys(COUNTED, 0) for _ in self.streams] for split in self.splits}
        for span in self.spans():
            empty = int((span.lengths == 0).sum())
            numbers = len(span.lengths) - empty, empty, int(span.lengths.sum())
            sums = counts[span.split][span.stream]
            sums |= {key: sums[key] + number for key, number in zip(COUNTED, numbers, strict=True)}
        return counts


def check_split(args: DataArguments, sources: Sources) -> None:
    """Raise UserError if a source does not support --split, or a file is used twice."""
    trained: set[tuple[str, ...]] = set()
    for source in sources.training:
        tokens, own = any(file.name.endswith(TOKENS) for file in source.files), source.validation_files
        problems = {
            "has only validation files. Pass training files too": not source.files,
            "has no validation files (`val` in the name). Pass --split head or hash": args.split == "source"
            and not own,
            "has validation files. Pass --split source to use them": args.split == "head" and tokens and own,
            "has tokens, but --split hash needs text. Pass --split source or head": args.split == "hash" and tokens,
            "has tokens, so there is no text to save. Pass --validation_text false": args.validation_text and tokens,
        }
        if problem := next((problem for problem, applies in problems.items() if applies), None):
            raise UserError(f"{source.description['name']} {problem}.")
        files = {file.identity(): file.name for file in source.files}
        if twice := files.keys() & trained:
            raise UserError(f"Two sources of the mixture contain {files[min(twice)]}. Pass this file only once.")
        trained |= files.keys()
    for name, source in sources.validation_sets.items():
        if any(file.identity() in trained for file in source.validation_files or source.files):
            raise UserError(f"The validation set {name!r} has text that is also in the training sources.")


def groups_of(sources: Sources, args: DataArguments) -> list[Group]:
    """Return which files are tokenized for which splits."""
    named = [(number, source.description["name"], source) for number, source in enumerate(sources.training)]
    most = args.max_tokens or np.inf
    train = [Stream(f"train-{i}", name, each.files, each.weight, most * each.weight) for i, name, each in named]
    groups = [Group(SPLITS, train, most)]
    if args.split == "source":
        own = [Stream(f"validation-{i}", name, each.validation_files, each.weight) for i, name, each in named]
        groups = [Group(["validation"], own), Group(["train"], train, most)]
    for name, source in sources.validation_sets.items():
        files = source.validation_files or source.files
        stream = Stream(f"validation_{name}", source.description["name"], files, limit=args.validation_tokens)
        groups.append(Group([stream.name], [stream], args.validation_tokens))
    return groups


def stage_group(group: Group, staging: Path, args: DataArguments, options: PreparationOptions) -> None:
    """Tokenize the files of a group, and decide where its splits end."""
    # A mixture ends as soon as one of its sources ends.
    # Stage the source first that will probably end first, and of the others only as much as the mixture can use.
    for stream in sorted(group.streams, key=lambda stream: sum(file.size for file in stream.files) / stream.weight):
        stage(stream, staging, args, options)
        if len(group.streams) > 1:
            group.below = min(group.below, stream.end())
            for other in group.streams:
                other.limit = group.below * other.weight
    if group.splits == SPLITS:
        _choose_validation(group, args)


def _choose_validation(group: Group, args: DataArguments) -> None:
    """Set the rule by which --split head or hash divides a group into validation and training."""
    streams, every = group.streams, range(len(group.streams))
    total = min(group.below, *(stream.end() for stream in streams))
    if args.split == "hash":
        group.hashed, tokens = every, args.validation_fraction * total
        if few := [number for number in every if streams[number].total("documents") <= FEW_DOCUMENTS]:
            counts = group.counts()
            sizes = [[counts[split][number]["tokens"] for split in SPLITS] for number in every]
            enough = len(streams) == 1 and min(sizes[0]) > args.sequence_length
            shares = [stream.weight * tokens for stream in streams]
            few = [n for n in few if not (enough if len(streams) == 1 else _is_near(sizes[n][0], shares[n]))]
        if few:
            group.hashed, group.head, group.cut = {*every} - {*few}, float(round(tokens)), True
            share = f"the first {args.validation_fraction:.1%} of it, and may cut a document"
            named = " and ".join(streams[number].source for number in few)
            group.remark = f"--split hash has too few documents in {named}: validation has {share}"
        return
    requested, most = float(args.validation_tokens), MOST_HELD_OUT * total
    # Rounded, because otherwise a document that starts less than a token before it is included.
    group.head = head = float(round(min(requested, most)))
    held_out = [count["tokens"] for count in dataclasses.replace(group, below=head).counts()["validation"]]
    # A document that starts in the head and ends after it goes to validation completely. But it is cut in two if
    # validation would otherwise have more than 10 % of all tokens, or not the shares of a mixture, or if more than
    # 10 % was requested.
    even = len(streams) == 1 or all(_is_near(held_out[n], streams[n].weight * head) for n in every)
    if total and not (requested <= most and sum(held_out) <= most and even):
        group.cut = True
        less = f" instead of the {requested:,.0f} that were requested" if requested > head else ""
        share = f"the first {head:,.0f} of {total:,.0f} tokens ({head / total:.1%})"
        group.remark = f"validation has {share}{less}. Its last document may be cut"


def _is_near(tokens: float, requested: float) -> bool:
    return abs(tokens - requested) <= requested / 4


def _documents(stream: Stream, index: int, head: float | None) -> Iterator[tuple[np.ndarray, float]]:
    """For each file part, yield its documents and the position of the part's end.

    Documents before the position `head` are held out. If `head` is None, --split hash chooses the documents.
    """
    tokens = 0
    for number, part in enumerate(stream.parts):
        lengths = part.lengths()
        documents = np.zeros(len(lengths), _DOCUMENT)
        documents["length"], documents["first_token"] = lengths, np.cumsum(lengths) - lengths
        documents["start"] = (tokens + documents["first_token"]) / stream.weight
        documents["stream"], documents["part"], documents["number"] = index, number, np.arange(len(lengths))
        documents["held_out"] = part.held_out() if head is None else documents["start"] < head
        tokens += int(lengths.sum())
        yield documents, tokens / stream.weight


def _cut_documents(documents: np.ndarray, place: float, weights: np.ndarray, whole: Collection[int]) -> np.ndarray:
    """Cut each document that contains the position `place` into two, except those of the sources `whole`.

    Returns a new array of the dtype `_DOCUMENT`.
    """
    tokens = np.rint((place - documents["start"]) * weights[documents["stream"]]).astype(np.int64)
    across = np.flatnonzero((tokens > 0) & (tokens < documents["length"]) & ~np.isin(documents["stream"], list(whole)))
    rest, tokens = documents[across], tokens[across]
    rest["start"], rest["held_out"] = place, False
    rest["first_token"] += tokens
    rest["length"] -= tokens
    documents["length"][across] = tokens
    return np.insert(documents, across + 1, rest)


def _spans(documents: np.ndarray, splits: Sequence[str]) -> Iterator[DocumentSpan]:
    codes = np.where(documents["held_out"], 0, len(splits) - 1)
    same = [np.diff(values) == 0 for values in (documents["stream"], documents["part"], codes)]
    follows = np.logical_and.reduce([np.diff(documents["number"]) == 1, *same])
    edges = [0, *(np.flatnonzero(~follows) + 1).tolist(), len(codes)] if len(codes) else []
    for first, last in itertools.pairwise(edges):
        stream, part, number, token = documents[["stream", "part", "number", "first_token"]][first].item()
        yield DocumentSpan(stream, part, number, token, documents["length"][first:last], splits[codes[first]])

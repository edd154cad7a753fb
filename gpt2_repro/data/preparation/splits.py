"""Choose the files to tokenize, and divide their documents into splits."""

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from gpt2_repro.data.arguments import DataArguments, PreparationOptions
from gpt2_repro.data.preparation.staging import StagedPart, Stream, stage
from gpt2_repro.data.sources.base import Source, SourceFile
from gpt2_repro.data.sources.opening import Sources
from gpt2_repro.data.sources.token_files import TOKENS
from gpt2_repro.errors import UserError


SPLITS = ["validation", "train"]
FEW_DOCUMENTS = 10_000  # of so few, --split hash may hold out far too few or too many
MOST_HELD_OUT = 0.1  # maximum share of the tokens that --split head holds out


@dataclasses.dataclass(frozen=True)
class DocumentSpan:
    """Consecutive documents that go to the same split, from one part of a source file."""

    part: StagedPart
    first_document: int  # number of documents in the file part before these documents
    first_token: int  # number of tokens in the file part before these documents
    lengths: np.ndarray  # [documents], in tokens
    split: str
    source: str  # the name under which the tokens are counted
    source_number: int = 0  # of the source in a mixture


@dataclasses.dataclass
class DocumentCounts:
    """How many documents and tokens a split has."""

    documents: int = 0
    empty_documents: int = 0  # not counted in `documents`
    tokens: int = 0
    tokens_by_source: dict[str, int] = dataclasses.field(default_factory=dict)

    def add(self, span: DocumentSpan) -> None:
        tokens = int(span.lengths.sum())
        with_text = int(np.count_nonzero(span.lengths))
        self.documents += with_text
        self.empty_documents += len(span.lengths) - with_text
        self.tokens += tokens
        self.tokens_by_source.setdefault(span.source, 0)
        self.tokens_by_source[span.source] += tokens


@dataclasses.dataclass(frozen=True)
class _Documents:
    """Consecutive documents of one part of a source file, as arrays of shape [documents]."""

    numbers: np.ndarray  # place of each document in the part
    first_tokens: np.ndarray  # number of tokens in the part before each document
    lengths: np.ndarray  # in tokens
    held_out: np.ndarray  # whether validation has the document

    def first(self, count: int) -> "_Documents":
        """Return the first `count` documents."""
        return _Documents(
            numbers=self.numbers[:count],
            first_tokens=self.first_tokens[:count],
            lengths=self.lengths[:count],
            held_out=self.held_out[:count],
        )

    def with_cut(self, place: int) -> "_Documents":
        """Cut the document in two that contains the token `place` of its part, but does not begin with it."""
        following = int(np.searchsorted(self.first_tokens, place))
        if following == 0:
            return self
        index = following - 1
        end = self.first_tokens[index] + self.lengths[index]
        rest = end - place
        if rest <= 0:
            return self
        lengths = np.insert(self.lengths, following, rest)
        lengths[index] -= rest
        return _Documents(
            numbers=np.insert(self.numbers, following, self.numbers[index]),
            first_tokens=np.insert(self.first_tokens, following, place),
            lengths=lengths,
            held_out=np.insert(self.held_out, following, False),
        )


@dataclasses.dataclass
class Group:
    """One or two splits whose documents come from the same source files."""

    splits: list[str]  # of two splits, the first one is validation, and the second one has all other documents
    stream: Stream
    # The position at which validation ends. The position of a document is the number of tokens before it. If it is
    # None, --split hash chooses the documents.
    head: float | None = np.inf
    cut: bool = False  # whether to cut the document in two that contains the position `head`
    remarks: list[str] = dataclasses.field(default_factory=list)  # how the splits differ from the requested ones
    limit: float = np.inf  # the position at which both splits end, if they end before the limit of the stream

    def spans(self) -> Iterator[DocumentSpan]:
        """Yield the documents that start before the limit of the stream, in order."""
        before = 0  # tokens in earlier parts
        for part in self.stream.parts:
            documents = self._documents(part, before)
            before += part.summary.tokens
            held_out = documents.held_out
            if not len(held_out):
                continue
            changes = np.flatnonzero(np.diff(held_out)) + 1
            edges = [0, *changes.tolist(), len(held_out)]
            for first, last in itertools.pairwise(edges):  # documents of the same split
                split = self.splits[-1]
                if held_out[first]:
                    split = self.splits[0]
                yield DocumentSpan(
                    part=part,
                    first_document=int(documents.numbers[first]),
                    first_token=int(documents.first_tokens[first]),
                    lengths=documents.lengths[first:last],
                    split=split,
                    source=part.file.source,
                )

    def spans_of(self, split: str) -> Iterator[DocumentSpan]:
        """Yield the documents of one split, in order."""
        for span in self.spans():
            if span.split == split:
                yield span

    def _documents(self, part: StagedPart, before: int) -> _Documents:
        """Return the documents of a part that start before the limit. `before` is the number of tokens before it."""
        lengths = part.lengths()
        first_tokens = np.cumsum(lengths) - lengths
        positions = before + first_tokens
        if self.head is None:
            held_out = part.held_out()
        else:
            held_out = positions < self.head
        numbers = np.arange(len(lengths))
        limit = self.limit
        if not self.stream.limits_training:
            limit = min(limit, self.stream.limit)
        used = int(np.searchsorted(positions, limit))
        documents = _Documents(numbers, first_tokens, lengths, held_out).first(used)
        if self.cut and self.head and before < self.head:
            return documents.with_cut(round(self.head) - before)
        return documents

    @property
    def streams(self) -> list[Stream]:
        return [self.stream]

    def counts(self) -> dict[str, DocumentCounts]:
        """Count documents, empty documents and tokens per split."""
        counts = {split: DocumentCounts() for split in self.splits}
        for span in self.spans():
            counts[span.split].add(span)
        return counts


def check_split(args: DataArguments, sources: Sources) -> None:
    """Raise UserError if a source does not support --split, or a file is used twice."""
    trained: set[tuple[str, ...]] = set()
    for source in sources.training:
        _check_source(source, args)
        for file in [*source.files, *source.validation_files]:
            if file.identity() in trained:
                raise UserError(f"{file.name} is in two sources of the mixture. Name each file once.")
        trained |= {file.identity() for file in source.files}
    for set_name, validation in sources.validation_sets.items():
        for file in _files_of_set(validation):
            if file.identity() in trained:
                raise UserError(f"The validation set {set_name!r} has text that is also in the training sources.")


def _check_source(source: Source, args: DataArguments) -> None:
    """Raise UserError if a source does not support --split."""
    name = source.description["name"]
    has_tokens = any(file.name.endswith(TOKENS) for file in source.files)
    has_validation = bool(source.validation_files)
    if not source.files:
        raise UserError(f"{name} has only validation files. Pass training files too.")
    if args.split == "source" and not has_validation:
        raise UserError(f"{name} has no validation files (`val` in the name). Pass --split head or hash.")
    if args.split == "head" and has_tokens and has_validation:
        raise UserError(f"{name} has validation files. Pass --split source to use them.")
    if args.split == "hash" and has_tokens:
        raise UserError(f"{name} has tokens, but --split hash needs text. Pass --split source or head.")
    if args.validation_text and has_tokens:
        raise UserError(f"{name} has tokens, so there is no text to save. Pass --validation_text false.")


def _files_of_set(source: Source) -> list[SourceFile]:
    """Return the files of a validation set: the validation files of its source, or all if none are named so."""
    return source.validation_files or source.files


def groups_of(source: Source, args: DataArguments) -> list[Group]:
    """Return which files of a single source are tokenized for which splits."""
    train = Stream("train", source.files, args.max_tokens or np.inf)
    if args.split != "source":
        return [Group(SPLITS, train)]
    validation = Stream("validation", source.validation_files)
    return [Group(["validation"], validation), Group(["train"], train)]


def groups_of_sets(sets: dict[str, Source], args: DataArguments) -> list[Group]:
    """Return the files of --validation_sets."""
    groups: list[Group] = []
    for name, source in sets.items():
        stream = Stream(f"validation_{name}", _files_of_set(source), args.validation_tokens)
        groups.append(Group([stream.name], stream))
    return groups


def stage_groups(groups: list[Group], staging: Path, args: DataArguments, options: PreparationOptions) -> None:
    """Tokenize the files of groups, and decide where their splits end."""
    for group in groups:
        stage(group.stream, staging, args, options)
        tokens = sum(part.summary.tokens for part in group.stream.parts)
        if group.splits[-1] == "train" and tokens < args.max_tokens:
            group.remarks.append(f"the source has {tokens:,} of the {args.max_tokens:,} tokens of --max_tokens")
        if group.splits == SPLITS:
            total = min(group.stream.limit, tokens)
            choose_validation(group, args, total, args.validation_tokens)


def choose_validation(group: Group, args: DataArguments, total: float, requested: float) -> None:
    """Set the rule by which --split head or hash divides a group into validation and training.

    Args:
        total: tokens of both splits together.
        requested: tokens of validation with --split head.
    """
    if args.split == "hash":
        group.head = None
        documents = sum(part.summary.documents for part in group.stream.parts)
        if documents <= FEW_DOCUMENTS and _has_small_split(group, args):
            group.head = round(args.validation_fraction * total)
            group.cut = True
            share = f"the first {args.validation_fraction:.1%} of the text, and may cut a document"
            group.remarks.append(f"--split hash has too few documents: validation has {share}")
        return
    most = MOST_HELD_OUT * total
    # Rounded, because otherwise a document that starts less than a token before it is included.
    head = round(min(requested, most))
    group.head = head
    # A document that starts in the head and ends after it goes to validation completely. But it is cut in two if
    # validation would otherwise have more than 10 % of all tokens, or if more than 10 % was requested.
    if total and max(requested, group.counts()["validation"].tokens) > most:
        group.cut = True
        less = ""
        if requested > head:
            less = f" instead of the {requested:,.0f} that were requested"
        share = f"the first {head:,} of {total:,.0f} tokens ({head / total:.1%})"
        group.remarks.append(f"validation has {share}{less}. Its last document may be cut")


def _has_small_split(group: Group, args: DataArguments) -> bool:
    """Return whether a split has too few tokens for a row of the full length."""
    return any(counts.tokens <= args.sequence_length for counts in group.counts().values())

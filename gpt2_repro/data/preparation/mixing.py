"""Mix sources: choose how many tokens of each source a split has, and the order of their documents.

The shares are of the tokens of the training split. Documents are taken in runs from the source that has the smallest
part of its tokens so far, so every part of a split has about the shares of the whole. The order depends only on the
lengths of the documents.
"""

import dataclasses
import math
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import numpy as np

from gpt2_repro.data.arguments import DataArguments, PreparationOptions
from gpt2_repro.data.packing import count_targets
from gpt2_repro.data.preparation.estimates import expected_tokens, row_bytes, staged_bytes
from gpt2_repro.data.preparation.splits import SPLITS, DocumentCounts, DocumentSpan, Group, choose_validation
from gpt2_repro.data.preparation.staging import Stream, stage
from gpt2_repro.data.sources.base import Source
from gpt2_repro.data.sources.mixture import MixturePart
from gpt2_repro.data.sources.opening import Sources
from gpt2_repro.errors import UserError
from gpt2_repro.manifest import MixedSource


RUNS = 2000  # a split is divided into at least so many runs, if they have at least a row
MOST_RUN_TOKENS = 2**16  # tokens of a run
# Tokens that are staged in addition to those of --validation_tokens: the last document may end after them.
LAST_DOCUMENT = 2**20


@dataclasses.dataclass
class Ingredient:
    """A source of a mixture with its tokens."""

    part: MixturePart
    number: int
    train: Group
    validation: Group  # with --split head and hash, the same group as `train`
    is_complete: bool  # whether all files were read; otherwise, more than enough tokens were read
    available: int = 0  # tokens of the training split, in one pass
    held_out: int = 0  # tokens of the validation split
    used: int = 0  # tokens in the mixture


def _most_tokens(ingredient: Ingredient) -> Fraction:
    """Return the tokens that the training split has if this source ends first."""
    return ingredient.part.passes * ingredient.available / ingredient.part.share


class _Reader:
    """Take documents of one source in order, and begin again if more tokens are needed."""

    def __init__(self, ingredient: Ingredient, split: str, quota: int) -> None:
        self.ingredient = ingredient
        self.split = split
        self.quota = quota  # tokens to take
        self.taken = 0
        self._spans = self._passes()
        self._span: DocumentSpan | None = None
        self._first = 0  # document of the span that is taken next
        self._edges = np.empty(0, np.int64)  # tokens of the span before each document

    def take(self, tokens: int) -> Iterator[DocumentSpan]:
        """Yield complete documents that have at least `tokens` tokens together. The quota cuts the last one."""
        stop = min(self.taken + tokens, self.quota)
        while self.taken < stop:
            span = self._open_span()
            first = self._first
            start = int(self._edges[first])
            wanted = start + stop - self.taken
            enough = int(np.searchsorted(self._edges, wanted))
            last = min(enough, len(span.lengths))
            lengths = span.lengths[first:last]
            self.taken += int(self._edges[last]) - start
            self._first = last
            excess = self.taken - self.quota
            if excess > 0:
                lengths = lengths.copy()
                lengths[-1] -= excess
                self.taken = self.quota
            yield DocumentSpan(
                part=span.part,
                first_document=span.first_document + first,
                first_token=span.first_token + start,
                lengths=lengths,
                split=self.split,
                source=self.ingredient.part.source,
                source_number=self.ingredient.number,
            )

    def _open_span(self) -> DocumentSpan:
        """Return the span that has the next document."""
        while self._span is None or self._first == len(self._span.lengths):
            self._span = next(self._spans)
            self._first = 0
            self._edges = np.concatenate([[0], np.cumsum(self._span.lengths)])
        return self._span

    def _passes(self) -> Iterator[DocumentSpan]:
        group = self.ingredient.train
        split = "train"
        if self.split != "train":
            group = self.ingredient.validation
            split = "validation"
        while True:
            yield from group.spans_of(split)


def _interleave(readers: list[_Reader], run: int) -> Iterator[DocumentSpan]:
    """Take runs of `run` tokens until each reader has its quota."""
    readers = [reader for reader in readers if reader.quota]
    while readers:
        behind = readers[0]
        for reader in readers[1:]:
            # The same as comparing taken / quota of both, without rounding.
            own_part = reader.taken * behind.quota
            smallest_part = behind.taken * reader.quota
            if own_part < smallest_part:
                behind = reader
        if behind.taken == behind.quota:
            return  # the first reader with the smallest part has all of its tokens, and so have the others
        yield from behind.take(run)


@dataclasses.dataclass
class Mixture:
    """The splits of a mixture: validation, training, and the held-out documents of single sources."""

    ingredients: list[Ingredient]
    held_out_sets: dict[str, int]  # of --validation_sets, by number of the source
    args: DataArguments

    @property
    def splits(self) -> list[str]:
        return SPLITS + [f"validation_{name}" for name in self.held_out_sets]

    @property
    def streams(self) -> list[Stream]:
        streams: list[Stream] = []
        for ingredient in self.ingredients:
            streams.append(ingredient.train.stream)
            if ingredient.validation is not ingredient.train:
                streams.append(ingredient.validation.stream)
        return streams

    @property
    def remarks(self) -> list[str]:
        remarks: list[str] = []
        for ingredient in self.ingredients:
            for remark in ingredient.validation.remarks:
                remarks.append(f"{ingredient.part.source}: {remark}")
        total = sum(ingredient.used for ingredient in self.ingredients)
        shortest = min(self.ingredients, key=_most_tokens)
        if _most_tokens(shortest) < self.args.max_tokens:
            problem = f"train has {total:,} of the {self.args.max_tokens:,} tokens of --max_tokens"
            fix = "Add text to it, or pass a smaller share or more passes (xN)"
            remarks.append(f"{problem}, because {shortest.part.source} has no more. {fix}")
        return remarks

    def described(self) -> list[MixedSource]:
        """Return the sources for the manifest."""
        row_tokens: list[int | None] = [None] * len(self.ingredients)
        if self.args.packing == "wrap":
            row_tokens = list(self._count_row_tokens())
        described: list[MixedSource] = []
        for ingredient in self.ingredients:
            part = ingredient.part
            available = None
            if ingredient.is_complete:
                available = ingredient.available
            mixed = MixedSource(
                source=part.source,
                share=float(part.share),
                passes=part.passes,
                available=available,
                used=ingredient.used,
                row_tokens=row_tokens[ingredient.number],
            )
            described.append(mixed)
        return described

    def _count_row_tokens(self) -> list[int]:
        """Count the targets of each source in the rows of the training split, with --packing wrap."""
        counts = [0] * len(self.ingredients)
        for span in self.spans_of("train"):
            targets = count_targets(span.lengths, self.args.sequence_length, min_length=self.args.min_length)
            counts[span.source_number] += targets
        return counts

    def spans_of(self, split: str) -> Iterator[DocumentSpan]:
        """Yield the documents of a split in order."""
        readers: list[_Reader] = []
        of_source = self.held_out_sets.get(split.removeprefix("validation_"))
        for ingredient in self.ingredients:
            if split == "train":
                readers.append(_Reader(ingredient, split, ingredient.used))
            elif split == "validation" or ingredient.number == of_source:
                readers.append(_Reader(ingredient, split, ingredient.held_out))
        tokens = sum(reader.quota for reader in readers)
        run = min(max(tokens // RUNS, self.args.sequence_length), MOST_RUN_TOKENS)
        return _interleave(readers, run)

    def counts(self) -> dict[str, DocumentCounts]:
        """Count documents, empty documents and tokens per split."""
        counts: dict[str, DocumentCounts] = {}
        for split in self.splits:
            counts[split] = DocumentCounts()
            for span in self.spans_of(split):
                counts[split].add(span)
        return counts


def stage_mixture(sources: Sources, staging: Path, args: DataArguments, options: PreparationOptions) -> Mixture:
    """Tokenize the sources of a mixture as far as they are needed, and choose the documents of its splits."""
    ingredients: dict[int, Ingredient] = {}
    most: Fraction | float = math.inf  # tokens that the training split can have
    if args.max_tokens:
        most = Fraction(args.max_tokens)
    expected = _expected_totals(sources, args)
    order = sorted(range(len(expected)), key=expected.__getitem__)
    for number in order:  # the source that ends first limits the others
        part = sources.mixture[number]
        ingredient = _stage_source(sources.training[number], part, number, most, staging, args, options)
        tokens = _staged_tokens(ingredient.train)
        most = min(most, part.passes * tokens / part.share)
        ingredients[number] = ingredient
    in_order = [ingredients[number] for number in range(len(order))]
    _divide(in_order, most, args)
    return Mixture(in_order, sources.held_out_sets, args)


def mixture_bytes(sources: Sources, args: DataArguments, itemsize: int) -> float:
    """Estimate the disk space that the splits of a mixture need. `itemsize` is the number of bytes per token id."""
    most = min(_expected_totals(sources, args))
    if args.max_tokens:
        most = min(most, args.max_tokens)
    needed = most * itemsize  # the rows of the training split
    for part, source in zip(sources.mixture, sources.training, strict=True):
        limit = _limit(part, most, args)
        needed += staged_bytes(Stream("", source.files, limit), args, itemsize)
        validation = Stream("", source.validation_files)
        if args.split == "source":
            needed += staged_bytes(validation, args, itemsize) + row_bytes(validation, args, itemsize)
    return needed


def _expected_totals(sources: Sources, args: DataArguments) -> list[float]:
    """Return, for each source, the expected tokens of the training split if this source ends first."""
    totals: list[float] = []
    for part, source in zip(sources.mixture, sources.training, strict=True):
        tokens = expected_tokens(source.files, args)
        totals.append(part.passes * tokens / float(part.share))
    return totals


def _limit(part: MixturePart, most: Fraction | float, args: DataArguments) -> float:
    """Return after how many tokens a source is not read further if the training split has at most `most` tokens."""
    tokens = float(part.share * most)  # further passes are used only if the first has fewer
    if args.split == "head":
        return tokens + float(part.share * args.validation_tokens) + LAST_DOCUMENT
    if args.split == "hash":
        # Without the documents that the hash holds out. Of few documents, the first ones are held out instead.
        return tokens / (1 - args.validation_fraction)
    return tokens


def _stage_source(
    source: Source,
    part: MixturePart,
    number: int,
    most: Fraction | float,
    staging: Path,
    args: DataArguments,
    options: PreparationOptions,
) -> Ingredient:
    """Tokenize one source, but not more than the training split needs if it has `most` tokens."""
    limit = _limit(part, most, args)
    stream = Stream(f"train-{number}", source.files, limit, limits_training=args.split == "hash")
    stage(stream, staging, args, options)
    tokens = 0
    for staged in stream.parts:
        tokens += staged.summary.tokens - staged.summary.held_out_tokens
    train = Group(SPLITS, stream)
    validation = train
    if args.split == "source":
        train = Group(["train"], stream)
        validation = Group(["validation"], Stream(f"validation-{number}", source.validation_files))
        stage(validation.stream, staging, args, options)
    return Ingredient(part, number, train, validation, is_complete=tokens <= limit)


def _staged_tokens(group: Group) -> int:
    return sum(part.summary.tokens for part in group.stream.parts)


def _divide(ingredients: list[Ingredient], most: Fraction | float, args: DataArguments) -> None:
    """Choose the validation documents of each source, and how many tokens of each source are trained.

    `most` is the largest number of tokens that the training split can have without validation.
    """
    total = most
    for ingredient in ingredients:
        part = ingredient.part
        group = ingredient.train
        if group is ingredient.validation:
            if args.split == "hash":  # how much more was staged must not matter
                group.head = None
                _end_after(group, math.ceil(part.share * most))
            tokens = min(_staged_tokens(group), part.share * most)
            choose_validation(group, args, float(tokens), float(part.share * args.validation_tokens))
            group.limit = np.inf
        ingredient.available = group.counts()["train"].tokens
        if not ingredient.available:
            raise UserError(f"{part.source} has no tokens for the training split. Pass another --source.")
        total = min(total, _most_tokens(ingredient))
    for ingredient in ingredients:
        ingredient.used = round(ingredient.part.share * total)
        if args.split == "hash" and ingredient.used < ingredient.available:
            _end_after(ingredient.train, ingredient.used)
        ingredient.held_out = ingredient.validation.counts()["validation"].tokens


def _end_after(group: Group, tokens: int) -> None:
    """Let a group end with the document in which its training split reaches a number of tokens."""
    before_part: dict[Path, int] = {}  # tokens in earlier parts
    position = 0
    for part in group.stream.parts:
        before_part[part.stem] = position
        position += part.summary.tokens
    taken = 0
    for span in group.spans_of("train"):
        edges = np.cumsum(span.lengths)
        if taken + int(edges[-1]) < tokens:
            taken += int(edges[-1])
            continue
        last = int(np.searchsorted(edges, tokens - taken))
        start = span.first_token + int(edges[last] - span.lengths[last])
        group.limit = before_part[span.part.stem] + start + 1
        return

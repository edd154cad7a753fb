"""Choose the files to tokenize, and divide their documents into splits."""

import dataclasses
import itertools
from collections.abc import Iterator
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


@dataclasses.dataclass(frozen=True)
class DocumentSpan:
    """Consecutive documents that go to the same split, from one part of a source file."""

    part: int  # index of the file part among all parts of the source
    first_document: int  # number of documents in the file part before these documents
    first_token: int  # number of tokens in the file part before these documents
    lengths: np.ndarray  # [documents], in tokens
    split: str


@dataclasses.dataclass
class Group:
    """One or two splits whose documents come from the same source files."""

    splits: list[str]  # of two splits, the first one is validation, and the second one has all other documents
    stream: Stream
    # The position at which validation ends. The position of a document is the number of tokens before it. If it is
    # None, --split hash chooses the documents.
    head: float | None = np.inf
    cut: bool = False  # whether to cut the document in two that contains the position `head`
    remark: str = ""  # how the validation split differs from the requested split, if it does

    def spans(self) -> Iterator[DocumentSpan]:
        """Yield the documents that start before the limit of the stream, in order."""
        before = 0  # tokens in earlier parts
        for index, part in enumerate(self.stream.parts):
            lengths, numbers = part.lengths(), np.arange(part.facts["documents"])
            tokens, first_tokens = int(lengths.sum()), np.cumsum(lengths) - lengths
            held_out = part.held_out() if self.head is None else before + first_tokens < self.head
            used = int(np.searchsorted(before + first_tokens, self.stream.limit))
            documents = [array[:used] for array in (numbers, first_tokens, lengths, held_out)]
            if self.cut and self.head and before < self.head:
                documents = _cut_document(*documents, place=round(self.head) - before)
            before += tokens
            numbers, first_tokens, lengths, held_out = documents
            edges = [0, *(np.flatnonzero(np.diff(held_out)) + 1).tolist(), len(held_out)]
            for first, last in itertools.pairwise(edges) if len(held_out) else ():  # runs of equal values
                split = self.splits[0 if held_out[first] else -1]
                yield DocumentSpan(index, int(numbers[first]), int(first_tokens[first]), lengths[first:last], split)

    def counts(self) -> dict[str, dict[str, int]]:
        """Count documents, empty documents and tokens per split."""
        counts = {split: dict.fromkeys(COUNTED, 0) for split in self.splits}
        for span in self.spans():
            empty = int((span.lengths == 0).sum())
            numbers = len(span.lengths) - empty, empty, int(span.lengths.sum())
            sums = counts[span.split]
            sums |= {key: sums[key] + number for key, number in zip(COUNTED, numbers, strict=True)}
        return counts

    def tokens_by_source(self) -> dict[str, dict[str, int]]:
        """Count the tokens of each source per split."""
        counts: dict[str, dict[str, int]] = {split: {} for split in self.splits}
        for span in self.spans():
            of_split = counts[span.split]
            source = self.stream.parts[span.part].file.source
            of_split[source] = of_split.get(source, 0) + int(span.lengths.sum())
        return counts


def check_split(args: DataArguments, sources: Sources) -> None:
    """Raise UserError if the source does not support --split, or a file is used for training and validation."""
    source = sources.training
    tokens, own = any(file.name.endswith(TOKENS) for file in source.files), source.validation_files
    problems = {
        "has only validation files. Pass training files too": not source.files,
        "has no validation files (`val` in the name). Pass --split head or hash": args.split == "source" and not own,
        "has validation files. Pass --split source to use them": args.split == "head" and tokens and own,
        "has tokens, but --split hash needs text. Pass --split source or head": args.split == "hash" and tokens,
        "has tokens, so there is no text to save. Pass --validation_text false": args.validation_text and tokens,
    }
    if problem := next((problem for problem, applies in problems.items() if applies), None):
        raise UserError(f"{source.description['name']} {problem}.")
    trained = {file.identity() for file in source.files}
    for name, other in sources.validation_sets.items():
        if any(file.identity() in trained for file in other.validation_files or other.files):
            raise UserError(f"The validation set {name!r} has text that is also in the training sources.")


def groups_of(sources: Sources, args: DataArguments) -> list[Group]:
    """Return which files are tokenized for which splits."""
    train = Stream("train", sources.training.files, args.max_tokens or np.inf)
    groups = [Group(SPLITS, train)]
    if args.split == "source":
        own = Stream("validation", sources.training.validation_files)
        groups = [Group(["validation"], own), Group(["train"], train)]
    for name, source in sources.validation_sets.items():
        stream = Stream(f"validation_{name}", source.validation_files or source.files, args.validation_tokens)
        groups.append(Group([stream.name], stream))
    return groups


def stage_group(group: Group, staging: Path, args: DataArguments, options: PreparationOptions) -> None:
    """Tokenize the files of a group, and decide where its splits end."""
    stage(group.stream, staging, args, options)
    if group.splits == SPLITS:
        _choose_validation(group, args)


def _choose_validation(group: Group, args: DataArguments) -> None:
    """Set the rule by which --split head or hash divides a group into validation and training."""
    total = min(group.stream.limit, group.stream.total("tokens"))
    if args.split == "hash":
        group.head = None
        is_small = group.stream.total("documents") <= FEW_DOCUMENTS
        if is_small and min(counts["tokens"] for counts in group.counts().values()) <= args.sequence_length:
            group.head, group.cut = round(args.validation_fraction * total), True
            share = f"the first {args.validation_fraction:.1%} of the text, and may cut a document"
            group.remark = f"--split hash has too few documents: validation has {share}"
        return
    requested, most = args.validation_tokens, MOST_HELD_OUT * total
    # Rounded, because otherwise a document that starts less than a token before it is included.
    group.head = head = round(min(requested, most))
    # A document that starts in the head and ends after it goes to validation completely. But it is cut in two if
    # validation would otherwise have more than 10 % of all tokens, or if more than 10 % was requested.
    if total and max(requested, group.counts()["validation"]["tokens"]) > most:
        group.cut = True
        less = f" instead of the {requested:,} that were requested" if requested > head else ""
        share = f"the first {head:,} of {total:,.0f} tokens ({head / total:.1%})"
        group.remark = f"validation has {share}{less}. Its last document may be cut"


def _cut_document(
    numbers: np.ndarray, first_tokens: np.ndarray, lengths: np.ndarray, held_out: np.ndarray, *, place: int
) -> list[np.ndarray]:
    """Cut the document in two that contains the token `place` of its part, but does not begin with it."""
    index = int(np.searchsorted(first_tokens, place)) - 1
    rest = first_tokens[index] + lengths[index] - place
    if rest > 0:
        lengths[index] -= rest
        pairs = ((numbers, numbers[index]), (first_tokens, place), (lengths, rest), (held_out, False))
        return [np.insert(array, index + 1, value) for array, value in pairs]
    return [numbers, first_tokens, lengths, held_out]

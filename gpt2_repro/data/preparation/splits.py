"""Which files a preparation stages, and which documents of them go to which split."""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from gpt2_repro.data.arguments import DataArguments
from gpt2_repro.data.preparation.order import DocumentSpan, runs
from gpt2_repro.data.preparation.tokenizing import StagedPart
from gpt2_repro.data.preparation.workers import Stream
from gpt2_repro.data.sources.opening import Source, documents_of
from gpt2_repro.errors import UserError


Stage = Callable[[Stream], list[StagedPart]]


@dataclasses.dataclass(frozen=True)
class Group:
    """Splits that are made of the same streams.

    Args:
        splits: their names, in the order in which they are written.
        streams: the staged parts of each stream.
        names: of the streams' sources.
        found: the documents of all streams in order, each time anew.
    """

    splits: list[str]
    streams: list[list[StagedPart]]
    names: list[str]
    found: Callable[[], Iterator[DocumentSpan]]


def validation_sets(args: DataArguments) -> dict[str, str]:
    """The sources of further validation sets by their names. Raises UserError for what names none."""
    sets = {}
    for text in args.validation_sets:
        name, _, source = text.partition("=")
        if not re.fullmatch(r"[a-z0-9_]+", name) or not source:
            raise UserError(
                f"--validation_sets {text} is not NAME=SOURCE with a NAME of a-z, 0-9 and _: pass books=pg19"
            )
        if name in sets:
            raise UserError(f"--validation_sets names {name} twice")
        sets[name] = source
    return sets


def check_split(args: DataArguments, sources: Sequence[Source], sets: dict[str, Source]) -> None:
    """Raise UserError where a source cannot be split as asked for."""
    for source in sources:
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
    trained: set[tuple[str, ...]] = set()
    for source in sources:
        files = {documents_of(file): file.name for file in source.files}
        if twice := files.keys() & trained:
            raise UserError(f"two sources of the mixture hold {files[min(twice)]}: name it once")
        trained |= files.keys()
    for name, source in sets.items():
        for file in source.validation_files or source.files:
            if documents_of(file) in trained:
                raise UserError(f"the validation set {name} would hold what is trained on, {file.name}: name another")
        of_training = [other.description["name"] for other in sources]
        if source.description["name"] in of_training and not (source.validation_files and args.split != "source"):
            raise UserError(f"the validation set {name} would hold what is trained on: name another source")


def streams_of(sources: Sequence[Source], sets: dict[str, Source], args: DataArguments) -> list[Stream]:
    """All streams as the arguments limit them."""
    limits = [int(args.max_tokens * source.weight) + 1 if args.max_tokens else 0 for source in sources]
    texts = args.validation_text
    pairs = enumerate(zip(sources, limits, strict=True))
    train = [Stream(f"train-{i}", s.files, limit, texts and args.split != "source") for i, (s, limit) in pairs]
    own = [Stream(f"validation-{i}", s.validation_files, keep_texts=texts) for i, s in enumerate(sources)]
    further = [
        Stream(f"validation_{name}", source.validation_files or source.files, args.validation_tokens)
        for name, source in sets.items()
    ]
    return [*train, *(own if args.split == "source" else []), *further]


def stage_groups(sources: Sequence[Source], sets: dict[str, Source], args: DataArguments, stage: Stage) -> list[Group]:
    """Stage all streams; the documents that they give, split. A mixture ends with the source that ends first."""
    streams = streams_of(sources, sets, args)
    names = [source.description["name"] for source in sources]
    weights = [source.weight for source in sources]
    train: list[list[StagedPart]] = [[] for _ in sources]
    below = float(args.max_tokens or np.inf)
    # The source that seems to end first comes first: of the others no more is staged than goes with it.
    for i in sorted(range(len(sources)), key=lambda i: sum(file.size for file in sources[i].files) / weights[i]):
        limit = 0 if below == np.inf else int(below * weights[i]) + 1
        train[i] = stage(dataclasses.replace(streams[i], limit=limit))
        if len(sources) > 1:
            below = min(below, sum(part.facts["tokens"] for part in train[i]) / weights[i])
    of_sets = streams[len(streams) - len(sets) :]
    if args.split == "source":
        own = [stage(stream) for stream in streams[len(sources) : 2 * len(sources)]]
        found = functools.partial(runs, train, weights, ["train"], below=below)
        groups = [
            Group(["validation"], own, names, functools.partial(_in_turn, own)),
            Group(["train"], train, names, found),
        ]
    else:
        both = ["validation", "train"]
        head = args.validation_tokens if args.split == "head" else None
        found = functools.partial(runs, train, weights, both, head=head, below=below)
        groups = [Group(both, train, names, found)]
    for (name, source), stream in zip(sets.items(), of_sets, strict=True):
        split, parts = f"validation_{name}", [stage(stream)]
        found = functools.partial(runs, parts, [1.0], [split], below=stream.limit)
        groups.append(Group([split], parts, [source.description["name"]], found))
    return groups


def _in_turn(streams: Sequence[Sequence[StagedPart]]) -> Iterator[DocumentSpan]:
    """The documents of one stream after the other, for validation."""
    for number, parts in enumerate(streams):
        for run in runs([parts], [1.0], ["validation"]):
            yield dataclasses.replace(run, stream=number)

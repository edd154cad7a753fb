"""Tokenize source files in worker processes, and stage the tokens in temporary files."""

import collections
import contextlib
import dataclasses
import functools
import hashlib
import io
import itertools
import json
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.pool import AsyncResult, ThreadPool
from pathlib import Path

import numpy as np

from gpt2_repro.cli import Progress
from gpt2_repro.data.arguments import DataArguments, PreparationOptions
from gpt2_repro.data.sources.base import Part, SourceFile
from gpt2_repro.data.sources.local_files import join_small
from gpt2_repro.data.sources.token_files import TokenPart, map_ids
from gpt2_repro.data.tokenizer import Encoder
from gpt2_repro.errors import UserError
from gpt2_repro.files import sync, write_whole
from gpt2_repro.processes import submit, worker_pool


STREAMS = "streams"  # the subfolder of the staging folder with the staged tokens
EXAMPLES = 3  # number of bad documents that the manifest quotes
CHECKED = 1000  # one document in CHECKED is encoded a second time, with `tokenizers`


@dataclasses.dataclass(frozen=True)
class IdsLocation:
    """The place of the token ids of a part."""

    path: str | None  # a local token file, or None for the part's temporary file .ids
    offset: int  # bytes in the file before the ids
    dtype: str


@dataclasses.dataclass(frozen=True)
class PartSummary:
    """The content of the .json file that describes a staged part."""

    tokens: int
    text_bytes: int
    bad: int  # unreadable rows
    bad_examples: list[str]  # error messages
    ids: IdsLocation
    documents: int
    longest: int  # tokens of the longest document
    held_out_tokens: int  # tokens of the documents that --split hash holds out
    front_matter: int  # documents whose front matter is left out

    @classmethod
    def from_json(cls, text: str) -> "PartSummary":
        values = json.loads(text)
        location = IdsLocation(**values.pop("ids"))
        return cls(**values, ids=location)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))


@dataclasses.dataclass(frozen=True)
class StagedPart:
    """One part of a source file, and the temporary files with its tokens."""

    stem: Path  # path of the temporary files without their extensions
    file: SourceFile
    number: int  # of the part in `file`
    size: int  # bytes, for the progress bar
    unread: Part | None  # the part of `file`, or None if its tokens were already staged
    done: Callable[[], None] | None  # called when the last part of a file and all parts before it are staged

    @functools.cached_property
    def summary(self) -> PartSummary:
        return PartSummary.from_json(self.stem.with_suffix(".json").read_text(encoding="utf-8"))

    def ids(self) -> np.ndarray:
        """Return the part's token ids as a memory-mapped array of shape [tokens]."""
        location = self.summary.ids
        path = self.stem.with_suffix(".ids")
        if location.path is not None:
            path = Path(location.path)
        return map_ids(path, location.offset, self.summary.tokens, np.dtype(location.dtype))

    def lengths(self) -> np.ndarray:
        """Return an array of shape [documents]: tokens per document, with separators."""
        arrays = np.load(self.stem.with_suffix(".npz"))
        return arrays["lengths"].astype(np.int64)

    def held_out(self) -> np.ndarray:
        """Return which documents --split hash holds out: a bool array of shape [documents]."""
        arrays = np.load(self.stem.with_suffix(".npz"))
        return arrays["held_out"]

    def texts(self) -> list[str]:
        """Read the documents of the part again."""
        self.file.fetch()
        part = self.file.parts()[self.number]
        return list(part.documents())


@dataclasses.dataclass
class Stream:
    """A sequence of source files that are tokenized one after another."""

    name: str  # of the subfolder for the tokens of the files
    files: list[SourceFile]
    limit: float = np.inf  # stop after more than this many tokens
    limits_training: bool = False  # whether the documents that --split hash holds out do not count for the limit
    parts: list[StagedPart] = dataclasses.field(default_factory=list)  # in order, as far as they are staged


def is_held_out(document: str, args: DataArguments) -> bool:
    """Return whether --split hash puts a document into validation."""
    key = args.split_seed.to_bytes(8, "little")
    digest = hashlib.blake2b(document.encode(), digest_size=8, key=key).digest()
    number = int.from_bytes(digest, "little")
    return number < args.validation_fraction * 2**64


@functools.lru_cache(maxsize=1)
def _encoder(folder: Path, changed: int, separator: str, engine: str) -> Encoder:
    return Encoder(folder, separator=separator, engine=engine)


@dataclasses.dataclass
class _Tokenized:
    """The documents of a part after tokenization."""

    ids: IdsLocation
    lengths: np.ndarray  # [documents], in tokens
    held_out: np.ndarray  # [documents], whether --split hash holds them out; empty for a token file
    held_out_tokens: int = 0
    text_bytes: int = 0
    bad: int = 0
    bad_examples: list[str] = dataclasses.field(default_factory=list)
    front_matter: int = 0


@dataclasses.dataclass(frozen=True)
class Limit:
    """The number of tokens after which no more documents are read."""

    tokens: float
    is_of_training: bool  # whether the documents that --split hash holds out do not count

    def is_reached(self, tokens: int, held_out_tokens: int) -> bool:
        if self.is_of_training:
            return tokens - held_out_tokens > self.tokens
        return tokens > self.tokens


def stage_part(
    part: Part, stem: Path, *, staging: Path, args: DataArguments, options: PreparationOptions, limit: Limit
) -> None:
    """Tokenize one part of a source file, and write the temporary files `stem`.*."""
    tokenizer = staging / "tokenizer"
    status = (tokenizer / "tokenizer.json").stat()
    encoder = _encoder(tokenizer, status.st_mtime_ns, args.separator, options.encoder)
    if isinstance(part, TokenPart):
        tokenized = _locate_tokens(part, encoder, args)
    else:
        partial = stem.with_suffix(f".{os.getpid()}.partial")
        tokenized = _encode_part(part, partial, encoder=encoder, args=args, options=options, limit=limit)
        partial.replace(stem.with_suffix(".ids"))
    lengths = tokenized.lengths
    longest = int(lengths.max(initial=0))
    stored_lengths = lengths.astype(np.uint64)
    if longest < 2**32:
        stored_lengths = lengths.astype(np.uint32)
    content = io.BytesIO()  # np.savez to a real file would report a full disk as an error without errno
    np.savez(content, lengths=stored_lengths, held_out=tokenized.held_out)
    write_whole(stem.with_suffix(".npz"), content.getvalue())
    summary = PartSummary(
        tokens=int(lengths.sum()),
        text_bytes=tokenized.text_bytes,
        bad=tokenized.bad,
        bad_examples=tokenized.bad_examples,
        ids=tokenized.ids,
        documents=len(lengths),
        longest=longest,
        held_out_tokens=tokenized.held_out_tokens,
        front_matter=tokenized.front_matter,
    )
    write_whole(stem.with_suffix(".json"), summary.to_json())  # written last: marks the part as complete


def _locate_tokens(part: TokenPart, encoder: Encoder, args: DataArguments) -> _Tokenized:
    """Check a token file and find its documents. Its ids stay where they are."""
    part.check(encoder.vocab_size, is_text=not args.tokenizer.startswith("none:"))
    lengths = part.lengths(encoder.end_of_text, args.separator)
    location = IdsLocation(str(Path(part.name).resolve()), part.offset, part.dtype.name)
    return _Tokenized(location, lengths, np.empty(0, bool))


def _encode_part(
    part: Part, path: Path, *, encoder: Encoder, args: DataArguments, options: PreparationOptions, limit: Limit
) -> _Tokenized:
    """Write the ids of a part's documents to a file."""
    lengths = [np.empty(0, np.int64)]
    held_out: list[bool] = []
    tokens = 0
    held_out_tokens = 0
    text_bytes = 0
    bad = 0
    bad_examples: list[str] = []
    front_matter = 0
    with path.open("wb") as file:
        for batch in part.read():
            documents = batch.documents
            front_matter += batch.front_matter
            bad += len(batch.bad)
            bad_examples += batch.bad[: EXAMPLES - len(bad_examples)]
            check_bad(bad, bad_examples, options.max_bad_documents)
            first_checked = -len(held_out) % CHECKED  # of these documents
            encoder.check(documents[first_checked::CHECKED], part.name)
            ids, lengths_of_batch = encoder.encode(documents)
            file.write(ids.tobytes())
            lengths.append(lengths_of_batch)
            for text, length in zip(documents, lengths_of_batch.tolist(), strict=True):
                is_in_validation = args.split == "hash" and is_held_out(text, args)
                held_out.append(is_in_validation)
                if is_in_validation:
                    held_out_tokens += length
                text_bytes += len(text.encode())
            tokens += len(ids)
            if limit.is_reached(tokens, held_out_tokens):
                break
    sync(path)
    return _Tokenized(
        ids=IdsLocation(None, 0, encoder.dtype.name),
        lengths=np.concatenate(lengths),
        held_out=np.array(held_out, bool),
        held_out_tokens=held_out_tokens,
        text_bytes=text_bytes,
        bad=bad,
        bad_examples=bad_examples,
        front_matter=front_matter,
    )


def check_bad(bad: int, examples: list[str], allowed: int) -> None:
    """Raise UserError if more rows are unreadable than --max_bad_documents allows."""
    if bad > allowed:
        fix = f"To skip files and rows that cannot be read, pass --max_bad_documents {max(100, 10 * allowed)}."
        raise UserError(f"{bad:,} files or rows cannot be read. The first: {examples[0]}. {fix}")


def stage(stream: Stream, staging: Path, args: DataArguments, options: PreparationOptions) -> None:
    """Tokenize the files of a stream, and set `stream.parts`.

    File parts that already have tokens in the folder `staging` are not tokenized again.
    """
    folder = staging / STREAMS / stream.name
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("*.partial"):  # left by workers that were killed
        path.unlink(missing_ok=True)
    limit = Limit(stream.limit, stream.limits_training)
    work = functools.partial(stage_part, staging=staging, args=args, options=options, limit=limit)
    size = sum(file.size for file in stream.files)
    examples: list[str] = []
    tokens = 0
    held_out_tokens = 0
    tokens_before_file = 0
    bad = 0
    with (
        Progress(total=size, desc=f"tokenize {stream.name}", unit="B", unit_scale=True, unit_divisor=1000) as bar,
        ThreadPool(1) as background,
        contextlib.closing(_finished(_parts(stream, folder, background), work, options.num_proc)) as finished,
    ):
        for part in finished:
            if part.number == 0:
                tokens_before_file = tokens
            if part.done:
                part.done()
                # The validation text is read from the files again when the splits are known.
                is_after_head = args.split == "head" and tokens_before_file >= args.validation_tokens
                if is_after_head or not args.validation_text:
                    part.file.drop()
            bar.update(part.size)
            stream.parts.append(part)
            tokens += part.summary.tokens
            held_out_tokens += part.summary.held_out_tokens
            bad += part.summary.bad
            examples += part.summary.bad_examples
            check_bad(bad, examples, options.max_bad_documents)
            if limit.is_reached(tokens, held_out_tokens):
                break
        background.close()
        background.join()  # otherwise the download of a file beyond the limit could outlast this function


def _parts(stream: Stream, folder: Path, background: ThreadPool) -> Iterator[StagedPart]:
    """Yield the parts of each source file, and download the files that have parts without tokens."""
    files = join_small(stream.files)
    notes = [folder / f"{index:05d}.json" for index in range(len(files))]
    downloads: dict[int, AsyncResult[None]] = {}

    def fetch(index: int) -> None:
        if index not in downloads:
            downloads[index] = background.apply_async(files[index].fetch)

    bytes_before_next = 0
    for index, file in enumerate(files):
        note = notes[index]
        bytes_before_next += file.size
        parts: Sequence[Part | None]
        if note.is_file():
            recorded = json.loads(note.read_text(encoding="utf-8"))
            parts = [None] * recorded["parts"]
        else:
            fetch(index)
            downloads[index].get()
            # Fetch the next file only if it is needed: a byte of parquet gives about a third of a token.
            has_unread_next = index + 1 < len(notes) and not notes[index + 1].is_file()
            if has_unread_next and stream.limit >= bytes_before_next // 3:
                fetch(index + 1)
            parts = file.parts()
        for number, part in enumerate(parts):
            stem = note.with_name(f"{note.stem}-{number:05d}")
            size = file.size // len(parts)
            if part:
                size = part.size
            unread = part
            if stem.with_suffix(".json").is_file():
                unread = None
            done = None
            if part and number == len(parts) - 1:
                content = json.dumps({"name": file.name, "parts": len(parts)})
                done = functools.partial(write_whole, note, content)
            yield StagedPart(stem, file, number, size, unread, done)


def _finished(parts: Iterator[StagedPart], work: Callable[..., None], num_proc: int) -> Generator[StagedPart]:
    """Run `work` for each unread part in worker processes, and yield all parts in order."""
    if num_proc == 1:
        for part in parts:
            if part.unread is not None:
                work(part.unread, part.stem)
            yield part
        return
    queue: collections.deque[tuple[StagedPart, Future[None] | None]] = collections.deque()
    try:
        with worker_pool(num_proc) as pool:
            while True:
                for part in itertools.islice(parts, 2 * num_proc + 1 - len(queue)):
                    future = None
                    if part.unread:
                        future = submit(pool, work, part.unread, part.stem)
                    queue.append((part, future))
                if not queue:
                    return
                part, future = queue.popleft()
                if future is not None:
                    future.result()
                yield part
    except BrokenProcessPool:
        fix = f"run the same command with --num_proc {max(1, num_proc // 2)} to resume."
        raise UserError(f"A worker ended. If no message above has the reason, memory ran out: {fix}") from None

"""Tokenize source files in worker processes, and stage the tokens in temporary files."""

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import importlib
import io
import itertools
import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Generator, Iterator
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import numpy as np

from gpt2_repro.cli import Progress
from gpt2_repro.data.arguments import DataArguments, PreparationOptions
from gpt2_repro.data.sources.base import Part, SourceFile
from gpt2_repro.data.sources.local_files import join_small
from gpt2_repro.data.sources.token_files import TokenPart, map_ids
from gpt2_repro.data.tokenizer import Encoder, Engine
from gpt2_repro.errors import UserError
from gpt2_repro.files import sync, write_whole


STREAMS = "streams"  # the subfolder of the staging folder with the staged tokens
EXAMPLES = 3  # number of bad documents that the manifest quotes
FEW_DOCUMENTS = 10_000  # of so few, --split hash may hold out far too few or too many
CHECKED = 1000  # one document in CHECKED is encoded a second time, with `tokenizers`


@dataclasses.dataclass(frozen=True)
class Stream:
    """A sequence of source files that are tokenized one after another."""

    name: str  # of the subfolder for the tokens of the files
    files: list[SourceFile]
    limit: int = 0  # stop after this many tokens; 0 means no limit
    keep_texts: bool = False  # whether to save the texts of documents that can be in the split `validation`


class StagedPart:
    """Temporary files with the tokens of one part of a source file."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name

    def path(self, ending: str) -> Path:
        return self.folder / f"{self.name}{ending}"

    def exists(self) -> bool:
        return self.path(".json").is_file()

    @functools.cached_property
    def facts(self) -> dict[str, Any]:
        """The content of the .json file that describes one part of a source file.

        The counts are `tokens`, `documents`, `text_bytes`, `longest` (tokens of the longest document) and `bad`
        (unreadable rows). `bad_examples` has error messages. `ids` is the location of the token ids.
        """
        return json.loads(self.path(".json").read_text(encoding="utf-8"))

    def ids(self) -> np.ndarray:
        """Return the part's token ids as a memory-mapped array of shape [tokens]."""
        where = self.facts["ids"]
        path = self.path(".ids") if where["path"] is None else Path(where["path"])
        return map_ids(path, where["offset"], self.facts["tokens"], np.dtype(where["dtype"]))

    def lengths(self) -> np.ndarray:
        """Return an array of shape [documents]: tokens per document, with separators."""
        return np.load(self.path(".npz"))["lengths"].astype(np.int64)

    def held_out(self) -> np.ndarray:
        """Return which documents --split hash holds out: a bool array of shape [documents]."""
        return np.load(self.path(".npz"))["held_out"]

    def texts(self) -> dict[int, str]:
        """Return the saved texts of documents, by their number in the part (from 0)."""
        with self.path(".jsonl").open(encoding="utf-8") as lines:
            return dict(map(json.loads, lines))

    def drop_texts(self) -> None:
        self.path(".jsonl").unlink(missing_ok=True)

    def keep_hashed_texts(self) -> None:
        """Drop the texts of documents that --split hash does not hold out."""
        held_out, texts = self.held_out(), self.texts()
        lines = (json.dumps([number, text]) + "\n" for number, text in texts.items() if held_out[number])
        write_whole(self.path(".jsonl"), "".join(lines))

    def complete(self, facts: dict[str, Any], lengths: np.ndarray, held_out: np.ndarray) -> None:
        content = io.BytesIO()  # np.savez to a real file would report a full disk as an error without errno
        np.savez(content, lengths=lengths.astype(np.uint32), held_out=held_out)
        write_whole(self.path(".npz"), content.getvalue())
        facts |= {"documents": len(lengths), "longest": int(lengths.max(initial=0))}
        write_whole(self.path(".json"), json.dumps(facts))  # written last: marks the part as complete


def is_held_out(document: str, args: DataArguments) -> bool:
    """Return whether --split hash puts a document into validation."""
    digest = hashlib.blake2b(document.encode(), digest_size=8, key=args.split_seed.to_bytes(8, "little")).digest()
    return int.from_bytes(digest, "little") < args.validation_fraction * 2**64


@functools.lru_cache(maxsize=1)
def _encoder(folder: Path, changed: int, separator: str, engine: Engine) -> Encoder:
    return Encoder(folder, separator=separator, engine=engine)


def stage_part(
    part: Part,
    staged: StagedPart,
    *,
    tokenizer: Path,
    args: DataArguments,
    options: PreparationOptions,
    limit: int,
    keep_texts: bool,
) -> None:
    """Tokenize one part of a source file, and write the temporary files `staged`."""
    encoder = _encoder(tokenizer, (tokenizer / "tokenizer.json").stat().st_mtime_ns, args.separator, options.encoder)
    facts: dict[str, Any] = {"tokens": 0, "text_bytes": 0, "bad": 0, "bad_examples": []}
    if isinstance(part, TokenPart):
        part.check(encoder.vocab_size)
        where = {"path": str(Path(part.name).resolve()), "offset": part.offset, "dtype": "uint16"}
        lengths = part.lengths(encoder.end_of_text, args.separator)
        return staged.complete(facts | {"tokens": part.tokens, "ids": where}, lengths, np.zeros(len(lengths), bool))

    lengths_of_batches, held_out = [np.empty(0, np.int64)], [np.empty(0, bool)]
    documents = 0
    partial = staged.path(f".{os.getpid()}.partial")
    try:
        with partial.open("wb") as file, staged.path(".jsonl").open("w", encoding="utf-8") as texts:
            for batch in part.read():
                facts["bad"] += len(batch.bad)
                facts["bad_examples"] += batch.bad[: EXAMPLES - len(facts["bad_examples"])]
                check_bad(facts["bad"], facts["bad_examples"], options.max_bad_documents)
                encoder.check(batch.documents[-documents % CHECKED :: CHECKED], part.name)
                ids, lengths = encoder.encode(batch.documents)
                file.write(ids.tobytes())
                held_out.append(_held_out(batch.documents, facts["tokens"] + np.cumsum(lengths) - lengths, args))
                if keep_texts:
                    # Of a source with few documents, others than those that the hash chooses may be held out.
                    few = (args.split == "hash") & (documents + np.arange(len(lengths)) < FEW_DOCUMENTS)
                    for place in np.flatnonzero(held_out[-1] | few).tolist():
                        texts.write(json.dumps([documents + place, batch.documents[place]]) + "\n")
                lengths_of_batches.append(lengths)
                documents += len(lengths)
                facts["tokens"] += len(ids)
                facts["text_bytes"] += sum(len(text.encode()) for text in batch.documents)
                if limit and facts["tokens"] >= limit:
                    break
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    if not keep_texts:
        staged.drop_texts()
    sync(partial)
    partial.replace(staged.path(".ids"))
    facts["ids"] = {"path": None, "offset": 0, "dtype": encoder.dtype.name}
    staged.complete(facts, np.concatenate(lengths_of_batches), np.concatenate(held_out))


def _held_out(documents: list[str], starts: np.ndarray, args: DataArguments) -> np.ndarray:
    """Return a bool array of shape [documents]: which documents can be in validation.

    `starts` has the number of tokens before each document in the file part.
    """
    if args.split == "hash":
        return np.array([is_held_out(text, args) for text in documents], bool)
    # With --split head, earlier file parts are not counted, so the result is used only to choose the texts to save.
    return starts < (args.validation_tokens if args.split == "head" else np.inf)


def check_bad(bad: int, examples: list[str], allowed: int) -> None:
    """Raise UserError if more rows are unreadable than --max_bad_documents allows."""
    if bad > allowed:
        fix = f"To skip files and rows that cannot be read, pass --max_bad_documents {max(100, 10 * allowed)}."
        raise UserError(f"{bad:,} files or rows cannot be read. The first: {examples[0]}. {fix}")


@dataclasses.dataclass(frozen=True)
class _Task:
    part: Part | None  # None if it is already staged
    staged: StagedPart
    size: int  # bytes of this part, for the progress bar
    done: Callable[[], None] | None = None  # called when the last part of a file and all parts before it are staged


def stage(
    stream: Stream, staging: Path, tokenizer: Path, args: DataArguments, options: PreparationOptions
) -> list[StagedPart]:
    """Tokenize a sequence of source files, and return their parts in order.

    File parts that already have tokens in the folder `staging` are not tokenized again. `tokenizer` is a folder.
    """
    folder = staging / STREAMS / stream.name
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("*.partial"):  # left by workers that were killed
        path.unlink(missing_ok=True)
    settings: dict[str, Any] = {"tokenizer": tokenizer, "args": args, "options": options}
    work = functools.partial(stage_part, **settings, limit=stream.limit, keep_texts=stream.keep_texts)
    parts: list[StagedPart] = []
    examples: list[str] = []
    tokens = bad = documents = kept = 0
    size = sum(file.size for file in stream.files)
    bar = Progress(total=size, desc=f"tokenize {stream.name}", unit="B", unit_scale=True, unit_divisor=1000)
    # Import `datasets`, which takes a second, while the workers are busy. Writing the rows needs it later.
    threading.Thread(target=importlib.import_module, args=("datasets",), daemon=True).start()
    with (
        bar,
        ThreadPool(1) as background,
        contextlib.closing(_finished(_tasks(stream, folder, background), work, options.num_proc)) as finished,
    ):
        for task in finished:
            if task.done:
                task.done()
            bar.update(task.size)
            parts.append(task.staged)
            if args.split == "head" and tokens >= args.validation_tokens:
                task.staged.drop_texts()  # this part starts after the head; a worker only counts its own part
            documents += task.staged.facts["documents"]
            if args.split == "hash" and stream.keep_texts and documents > FEW_DOCUMENTS:
                for part in parts[kept:]:
                    part.keep_hashed_texts()
                kept = len(parts)
            tokens += task.staged.facts["tokens"]
            bad += task.staged.facts["bad"]
            examples += task.staged.facts["bad_examples"]
            check_bad(bad, examples, options.max_bad_documents)
            if stream.limit and tokens >= stream.limit:
                break
        background.close()
        background.join()  # otherwise the download of a file beyond the limit could outlast this function
        bar.update(max(0, size - bar.n))
    return parts


def _tasks(stream: Stream, folder: Path, background: ThreadPool) -> Iterator[_Task]:
    """Yield one task for each part of each source file."""
    files = join_small(stream.files)
    notes = [folder / f"{index:05d}.json" for index in range(len(files))]
    fetch = functools.cache(lambda index: background.apply_async(files[index].fetch))
    read = 0
    for index, (file, note) in enumerate(zip(files, notes, strict=True)):
        read += file.size
        if note.is_file():
            count = json.loads(note.read_text(encoding="utf-8"))["parts"]
            for number in range(count):
                yield _Task(None, StagedPart(folder, f"{note.stem}-{number:05d}"), file.size // count)
            continue
        fetch(index).get()
        # Fetch the next file only if it is needed: a byte of parquet gives about a third of a token.
        if index + 1 < len(notes) and not notes[index + 1].is_file() and not 0 < stream.limit < read // 3:
            fetch(index + 1)
        parts = file.parts()
        done = functools.partial(_complete_file, file, note, len(parts))
        if not parts:
            done()
        for number, part in enumerate(parts, 1):
            staged = StagedPart(folder, f"{note.stem}-{number - 1:05d}")
            yield _Task(None if staged.exists() else part, staged, part.size, done if number == len(parts) else None)


def _complete_file(file: SourceFile, note: Path, parts: int) -> None:
    write_whole(note, json.dumps({"name": file.name, "parts": parts}))
    file.drop()


def _finished(tasks: Iterator[_Task], work: Callable[..., None], num_proc: int) -> Generator[_Task]:
    """Run `work` for each task in worker processes, and yield finished tasks in order."""
    if num_proc == 1:
        for task in tasks:
            if task.part is not None:
                work(task.part, task.staged)
            yield task
        return
    # Spawn instead of fork: a forked process inherits locks that threads of the tokenizer may hold.
    context = multiprocessing.get_context("spawn")
    executor = concurrent.futures.ProcessPoolExecutor(num_proc, context, initializer=_end_with_parent)
    queue: collections.deque[tuple[_Task, concurrent.futures.Future[None] | None]] = collections.deque()
    try:
        while True:
            for task in itertools.islice(tasks, 2 * num_proc + 1 - len(queue)):
                # The first call starts the workers. They inherit the mask: only the main process handles Ctrl-C.
                signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
                try:
                    queue.append((task, executor.submit(work, task.part, task.staged) if task.part else None))
                finally:
                    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
            if not queue:
                return
            task, future = queue.popleft()
            if future is not None:
                future.result()
            yield task
    except BrokenProcessPool:
        fix = f"Run the same command with --num_proc {max(1, num_proc // 2)} to resume."
        raise UserError(f"A worker was killed, probably because memory ran out. {fix}") from None
    finally:
        # After enough tokens, an error or Ctrl-C, do not wait for parts that workers have begun.
        for worker in multiprocessing.active_children():
            worker.terminate()
        executor.shutdown(cancel_futures=True)


def _end_with_parent() -> None:
    """Start a thread that ends this worker if the main process was killed."""

    def wait() -> None:
        if parent := multiprocessing.parent_process():
            parent.join()
            os._exit(1)

    threading.Thread(target=wait, daemon=True).start()

"""Tokenize source files in worker processes, one part of a file per task."""

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import importlib
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

from gpt2_repro.cli import Progress
from gpt2_repro.data.arguments import DataArguments, PreparationOptions
from gpt2_repro.data.preparation.tokenizing import StagedPart, check_bad, stage_part
from gpt2_repro.data.sources.base import Part, SourceFile
from gpt2_repro.data.sources.local_files import join_small
from gpt2_repro.errors import UserError
from gpt2_repro.files import write_whole


STREAMS = "streams"  # the subfolder of the staging folder with the staged tokens


@dataclasses.dataclass(frozen=True)
class Stream:
    """A sequence of source files that are tokenized one after another.

    Args:
        name: name of the subfolder for the tokens of the files.
        limit: stop after this many tokens; 0 means no limit.
        keep_texts: whether to save the texts of documents that can be in the split `validation`.
    """

    name: str
    files: list[SourceFile]
    limit: int = 0
    keep_texts: bool = False


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
    tokens = bad = 0
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
    keys, notes = list(files), [folder / f"{key}.json" for key in files]
    read = 0
    fetch = functools.cache(lambda index: background.apply_async(files[keys[index]].fetch))
    for index, (key, file) in enumerate(files.items()):
        note = notes[index]
        read += file.size
        if note.is_file():
            count = json.loads(note.read_text(encoding="utf-8"))["parts"]
            for number in range(count):
                yield _Task(None, StagedPart(folder, f"{key}-{number:05d}"), file.size // count)
            continue
        fetch(index).get()
        following = index + 1
        # Fetch the next file only if it is needed: a byte of parquet gives about a third of a token.
        if following < len(notes) and not notes[following].is_file() and not 0 < stream.limit < read // 3:
            fetch(following)
        parts = file.parts()
        done = functools.partial(_complete_file, file, note, len(parts))
        if not parts:
            done()
        for number, part in enumerate(parts):
            staged = StagedPart(folder, f"{key}-{number:05d}")
            last = number + 1 == len(parts)
            yield _Task(None if staged.exists() else part, staged, part.size, done if last else None)


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
    executor = concurrent.futures.ProcessPoolExecutor(num_proc, context, initializer=_begin_worker)
    queue: collections.deque[tuple[_Task, concurrent.futures.Future[None] | None]] = collections.deque()
    try:
        while True:
            for task in itertools.islice(tasks, 2 * num_proc + 1 - len(queue)):
                with _ctrl_c_waits():  # the first calls of submit start the workers
                    queue.append((task, executor.submit(work, task.part, task.staged) if task.part else None))
            if not queue:
                return
            task, future = queue.popleft()
            if future is not None:
                future.result()
            yield task
    except BrokenProcessPool:
        fewer = max(1, num_proc // 2)
        fix = f"Run the same command with --num_proc {fewer} to resume."
        raise UserError(f"A worker was killed, probably because memory ran out. {fix}") from None
    finally:
        # After enough tokens, an error or Ctrl-C, do not wait for parts that workers have begun.
        for worker in multiprocessing.active_children():
            worker.terminate()
        executor.shutdown(cancel_futures=True)


@contextlib.contextmanager
def _ctrl_c_waits() -> Iterator[None]:
    """Delay Ctrl-C while worker processes are started."""
    # A new worker imports modules for seconds before it ignores SIGINT, and SIGINT would then cause a traceback. So
    # SIGINT is blocked by a signal mask, which workers inherit. In the main process, another thread may receive SIGINT
    # despite the mask, and the handler still runs in the main thread. So the handler is replaced too.
    held: list[Any] = []
    handler = signal.signal(signal.SIGINT, lambda *words: held.append(words))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, handler)
    if held and callable(handler):
        handler(*held[0])


def _begin_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes: only the main process handles it
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    # If the main process is killed, its workers would otherwise wait for tasks and never end.
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)

"""Stage the files of a stream part by part, in worker processes, keeping what is already finished."""

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
from gpt2_repro.errors import UserError
from gpt2_repro.files import write_whole


STREAMS = "streams"  # the folder of staged tokens


@dataclasses.dataclass(frozen=True)
class Stream:
    """Files whose documents follow each other.

    Args:
        name: of its folder in the staging.
        files: in their order.
        limit: stop once there are so many tokens; 0 takes them all.
        keep_texts: stage the texts too that may be the split validation's.
    """

    name: str
    files: list[SourceFile]
    limit: int = 0
    keep_texts: bool = False


@dataclasses.dataclass(frozen=True)
class _Task:
    part: Part | None  # None: staged before
    staged: StagedPart
    size: int  # bytes of this part, for the progress bar
    done: Callable[[], None] | None = None  # to be called when the last part of a file is staged, and all before it


def stage(
    stream: Stream, staging: Path, tokenizer: Path, args: DataArguments, options: PreparationOptions
) -> list[StagedPart]:
    """Stage what is not staged yet, with a progress bar. Returns the parts in their order, up to the stream's limit."""
    folder = staging / STREAMS / stream.name
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("*.partial"):  # of workers that were killed
        path.unlink(missing_ok=True)
    work = functools.partial(stage_part, tokenizer=tokenizer, args=args, options=options)
    work = functools.partial(work, limit=stream.limit, keep_texts=stream.keep_texts)
    parts: list[StagedPart] = []
    examples: list[str] = []
    tokens = bad = 0
    size = sum(file.size for file in stream.files)
    bar = Progress(total=size, desc=f"tokenize {stream.name}", unit="B", unit_scale=True, unit_divisor=1000)
    # Rows are written with it, a second's import; the workers have the work now.
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
                task.staged.drop_texts()  # workers cannot know that this part lies behind the head
            tokens += task.staged.facts["tokens"]
            bad += task.staged.facts["bad"]
            examples += task.staged.facts["bad_examples"]
            check_bad(bad, examples, options.max_bad_documents)
            if stream.limit and tokens >= stream.limit:
                break
        background.close()
        background.join()  # the download of a file beyond the limit would outlive the staging
        bar.update(max(0, size - bar.n))
    return parts


def _tasks(stream: Stream, folder: Path, background: ThreadPool) -> Iterator[_Task]:
    """The parts of all files. While one file is tokenized, the next is fetched in the background."""
    notes = [folder / f"{index:05d}.json" for index in range(len(stream.files))]
    read = 0
    fetch = functools.cache(lambda index: background.apply_async(stream.files[index].fetch))
    for index, (file, note) in enumerate(zip(stream.files, notes, strict=True)):
        read += file.size
        if note.is_file():
            count = json.loads(note.read_text())["parts"]
            for number in range(count):
                yield _Task(None, StagedPart(folder, f"{index:05d}-{number:05d}"), file.size // count)
            continue
        fetch(index).get()
        following = index + 1
        # A third of a token a byte of parquet: is the next file needed?
        if following < len(notes) and not notes[following].is_file() and not 0 < stream.limit < read // 3:
            fetch(following)
        parts = file.parts()
        done = functools.partial(_complete_file, file, note, len(parts))
        if not parts:
            done()
        for number, part in enumerate(parts):
            staged = StagedPart(folder, f"{index:05d}-{number:05d}")
            last = number + 1 == len(parts)
            yield _Task(None if staged.exists() else part, staged, part.size, done if last else None)


def _complete_file(file: SourceFile, note: Path, parts: int) -> None:
    write_whole(note, json.dumps({"name": file.name, "parts": parts}))
    file.drop()


def _finished(tasks: Iterator[_Task], work: Callable[..., None], num_proc: int) -> Generator[_Task]:
    """Yield tasks in their order, each when its part is staged. Workers are a few tasks ahead of what is asked for."""
    if num_proc == 1:
        for task in tasks:
            if task.part is not None:
                work(task.part, task.staged)
            yield task
        return
    # Spawned, not forked: a fork copies the locks of the tokenizer's threads as they happen to be.
    context = multiprocessing.get_context("spawn")
    executor = concurrent.futures.ProcessPoolExecutor(num_proc, context, initializer=_begin_worker)
    queue: collections.deque[tuple[_Task, concurrent.futures.Future[None] | None]] = collections.deque()
    try:
        while True:
            for task in itertools.islice(tasks, 2 * num_proc + 1 - len(queue)):
                with _ctrl_c_waits():  # the first calls start the workers
                    queue.append((task, executor.submit(work, task.part, task.staged) if task.part else None))
            if not queue:
                return
            task, future = queue.popleft()
            if future is not None:
                future.result()
            yield task
    except BrokenProcessPool:
        fewer = max(1, num_proc // 2)
        raise UserError(f"A worker was killed, usually for memory. Resume with --num_proc {fewer}.") from None
    finally:
        # Enough tokens, an error or Ctrl-C: parts that a worker has begun are not waited for.
        for worker in multiprocessing.active_children():
            worker.terminate()
        executor.shutdown(cancel_futures=True)


@contextlib.contextmanager
def _ctrl_c_waits() -> Iterator[None]:
    """Hold Ctrl-C back while workers are started: a half-started one would end with a traceback.

    The workers inherit the mask, for they import for seconds before they ignore the signal. In this process the mask is
    not enough: another thread may take the signal, and its handler runs in the main thread all the same.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
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
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group: the main process decides
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    # A worker of a killed process would wait for tasks for ever.
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)

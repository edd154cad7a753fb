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
from pathlib import Path
from typing import Any

from tqdm import tqdm

from gpt2_repro.data.arguments import DataArguments, PreparationOptions
from gpt2_repro.data.preparation.staged import StagedPart, stage_part, too_many_bad
from gpt2_repro.data.sources.files import Part, SourceFile
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
    size: int  # bytes of the file
    finished: Callable[[], None]  # to be called when it is staged, and all before it


class _Stopped(Exception):
    """Nobody waits for this worker's result any more."""


def stage(
    stream: Stream, staging: Path, tokenizer: Path, args: DataArguments, options: PreparationOptions
) -> list[StagedPart]:
    """Stage what is not staged yet, with a progress bar. Returns the parts in their order, up to the stream's limit."""
    folder = staging / STREAMS / stream.name
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("*.partial"):  # of workers that were killed
        path.unlink(missing_ok=True)
    keywords = {"engine": options.encoder, "max_bad_documents": options.max_bad_documents}
    keywords |= {"limit": stream.limit, "keep_texts": stream.keep_texts}
    parts: list[StagedPart] = []
    tokens = bad = 0
    size = sum(file.size for file in stream.files)
    bar = tqdm(total=size, desc=f"tokenize {stream.name}", unit="B", unit_scale=True, unit_divisor=1000)
    coming: dict[int, concurrent.futures.Future[None]] = {}
    # Rows are written with it, a second's import; the workers have the work now.
    _in_background(functools.partial(importlib.import_module, "datasets"))
    with bar, contextlib.closing(_tasks(stream, folder, coming)) as tasks:
        words = (tokenizer, args)
        finished = _in_workers(tasks, words, keywords, options.num_proc, bar)
        with contextlib.closing(finished):
            for task in finished:
                task.finished()
                parts.append(task.staged)
                if args.split == "head" and tokens >= args.validation_tokens:
                    task.staged.drop_texts()  # workers cannot know that this part lies behind the head
                tokens += task.staged.facts["tokens"]
                bad += task.staged.facts["bad"]
                if bad > options.max_bad_documents:
                    raise too_many_bad(
                        [line for part in parts for line in part.facts["bad_examples"]], options.max_bad_documents
                    )
                if stream.limit and tokens >= stream.limit:
                    break
        concurrent.futures.wait(coming.values())  # a file beyond the limit: its download would outlive the staging
        bar.update(max(0, size - bar.n))
    return parts


def _tasks(stream: Stream, folder: Path, coming: dict[int, concurrent.futures.Future[None]]) -> Generator[_Task]:
    """The parts of all files. While one file is tokenized, the next is on its way and stands in `coming`."""
    notes = [folder / f"{index:05d}.json" for index in range(len(stream.files))]
    read = 0
    for index, (file, note) in enumerate(zip(stream.files, notes, strict=True)):
        read += file.size
        if note.is_file():
            count = json.loads(note.read_text())["parts"]
            for number in range(count):
                yield _Task(None, StagedPart(folder, f"{index:05d}-{number:05d}"), file.size // count, _nothing)
            continue
        if index in coming:
            coming.pop(index).result()
        else:
            file.fetch()
        following = index + 1
        # A third of a token a byte of parquet: is the next file needed?
        if following < len(notes) and not notes[following].is_file() and not 0 < stream.limit < read // 3:
            coming[following] = _in_background(stream.files[following].fetch)
        parts = file.parts()
        done = _file_done(note, file, len(parts))
        if not parts:
            done()
        for number, part in enumerate(parts):
            staged = StagedPart(folder, f"{index:05d}-{number:05d}")
            last = number + 1 == len(parts)
            yield _Task(None if staged.exists() else part, staged, part.size, done if last else _nothing)


def _in_background(call: Callable[[], Any]) -> concurrent.futures.Future[None]:
    """Like an executor's submit, in a thread that does not keep the process from ending."""
    future: concurrent.futures.Future[None] = concurrent.futures.Future()

    def run() -> None:
        try:
            call()
            future.set_result(None)
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def _file_done(note: Path, file: SourceFile, parts: int) -> Callable[[], None]:
    def done() -> None:
        write_whole(note, json.dumps({"name": file.name, "parts": parts}))
        file.drop()

    return done


def _nothing() -> None:
    pass


def _in_workers(
    tasks: Iterator[_Task], words: tuple[Any, ...], keywords: dict[str, Any], num_proc: int, bar: tqdm
) -> Generator[_Task]:
    """Finished tasks in their order, whatever finishes first."""
    if num_proc == 1:
        for task in tasks:
            if task.part is None:
                bar.update(task.size)
            else:
                stage_part(task.part, task.staged, *words, **keywords, report=bar.update)
            yield task
        return
    with contextlib.closing(_Pool(num_proc, words, keywords, bar)) as pool:
        try:
            yield from pool.run(tasks)
        except concurrent.futures.process.BrokenProcessPool:
            raise UserError(
                "A worker process was killed, usually because memory ran out. Start the same command again with "
                f"--num_proc {max(1, num_proc // 2)}: it resumes."
            ) from None


class _Pool:
    """Worker processes, a few tasks ahead of what is asked for."""

    def __init__(self, num_proc: int, words: tuple[Any, ...], keywords: dict[str, Any], bar: tqdm) -> None:
        # Spawned, not forked: a fork copies the locks of the tokenizer's threads as they happen to be.
        context = multiprocessing.get_context("spawn")
        self._read, self._stop = context.Value("q", 0), context.Event()
        self._executor = concurrent.futures.ProcessPoolExecutor(
            num_proc, context, initializer=_begin_worker, initargs=(self._read, self._stop)
        )
        self._words, self._keywords, self._bar, self._ahead = words, keywords, bar, 2 * num_proc + 1
        self._shown = 0

    def run(self, tasks: Iterator[_Task]) -> Generator[_Task]:
        """Yield finished tasks in their order. Raises BrokenProcessPool if a worker is killed."""
        queue: collections.deque[tuple[_Task, concurrent.futures.Future[None] | None]] = collections.deque()
        while True:
            queue.extend((task, self._submit(task)) for task in itertools.islice(tasks, self._ahead - len(queue)))
            if not queue:
                return
            task, future = queue.popleft()
            while future is not None and not concurrent.futures.wait([future], 0.2).done:
                self._show()
            if future is None:
                self._bar.update(task.size)
            else:
                future.result()
            self._show()
            yield task

    def _submit(self, task: _Task) -> concurrent.futures.Future[None] | None:
        if task.part is None:
            return None
        with _ctrl_c_waits():  # the first calls start the workers
            return self._executor.submit(_work, task.part, task.staged, self._words, self._keywords)

    def _show(self) -> None:
        read = self._read.value
        self._bar.update(read - self._shown)
        self._shown = read

    def close(self) -> None:
        # Enough tokens, an error or Ctrl-C: files that no worker has begun are left alone, and begun ones too.
        self._stop.set()
        self._executor.shutdown(cancel_futures=True)


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


_worker: dict[str, Any] = {}


def _begin_worker(read: Any, stop: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group: the main process decides
    _worker.update(read=read, stop=stop)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    # A worker of a killed process would wait for tasks for ever.
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _work(part: Part, staged: StagedPart, words: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    stage_part(part, staged, *words, **keywords, report=_count)


def _count(read: int) -> None:
    if _worker["stop"].is_set():
        raise _Stopped
    with _worker["read"].get_lock():
        _worker["read"].value += read

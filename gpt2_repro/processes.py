"""Pools of worker processes."""

import concurrent.futures
import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any, TypeVar


Result = TypeVar("Result")


@contextlib.contextmanager
def worker_pool(
    num_workers: int, start: Callable[..., None] | None = None, *args: Any
) -> Iterator[ProcessPoolExecutor]:
    """Yield a pool of processes, and end them at the end. After an error, they end in the middle of their work.

    A worker calls `start(*args)` first. Workers end if the main process is killed.
    """
    # Spawn instead of fork: a forked process inherits locks that threads of the tokenizer may hold.
    context = multiprocessing.get_context("spawn")
    # Workers must not import files of the current folder, such as types.py.
    safe_path = os.environ.get("PYTHONSAFEPATH", "")
    os.environ["PYTHONSAFEPATH"] = "1"
    pool = concurrent.futures.ProcessPoolExecutor(num_workers, context, initializer=_start, initargs=(start, args))
    try:
        yield pool
    except BaseException:  # an error, Ctrl-C, or the end of a generator that needs no more results
        for worker in multiprocessing.active_children():
            worker.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        os.environ["PYTHONSAFEPATH"] = safe_path


def submit(pool: ProcessPoolExecutor, work: Callable[..., Result], *args: Any) -> Future[Result]:
    """Let a pool call `work(*args)`. Workers ignore Ctrl-C, which the main process handles."""
    # A call can start a worker, which inherits the mask.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        with without_main_module():
            return pool.submit(work, *args)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


@contextlib.contextmanager
def without_main_module() -> Iterator[None]:
    """Hide the calling script from spawned processes.

    Otherwise, each process would import the script, and run it again unless it has `if __name__ == "__main__":`.
    """
    script = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = script


def _start(start: Callable[..., None] | None, args: tuple[Any, ...]) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if start is not None:
        start(*args)


def _end_with_parent() -> None:
    """End this worker after the main process was killed."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)

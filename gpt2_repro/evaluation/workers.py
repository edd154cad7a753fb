"""Score batches in several processes, each with a copy of the model on its own device.

lm-eval runs in the main process, which gives the batches of texts to the workers. The batches are the same for any
number of workers. So are the scores, apart from rounding on another kind of device.
"""

import contextlib
import logging
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Protocol, TypeVar

from gpt2_repro.errors import RunFailed
from gpt2_repro.evaluation.models import OpenedModel
from gpt2_repro.processes import submit, worker_pool


Batch = TypeVar("Batch")
Result = TypeVar("Result")


class Passes(Protocol):
    """Scores batches: `passes(score, batches)` yields `score(model, batch)` for each batch, in order."""

    def __call__(self, score: Callable[[Any, Batch], Result], batches: Sequence[Batch]) -> Iterator[Result]: ...


def passes_of(model: Any) -> Passes:
    """Return a function that scores batches in this process."""

    def run(score: Callable[[Any, Batch], Result], batches: Sequence[Batch]) -> Iterator[Result]:
        for batch in batches:
            yield score(model, batch)

    return run


class Workers:
    """Processes that score, one per device."""

    def __init__(self, pool: ProcessPoolExecutor) -> None:
        self._pool = pool

    def passes_of(self, model: OpenedModel) -> Passes:
        """Return a function that scores batches in all processes.

        It raises RunFailed if a process ends.
        """

        def run(score: Callable[[Any, Batch], Result], batches: Sequence[Batch]) -> Iterator[Result]:
            revision = model.column.revision
            futures: list[Future[Result]] = []
            try:
                for batch in batches:
                    futures.append(submit(self._pool, _score, revision, model.load, score, batch))
                for future in futures:
                    yield future.result()
            except BrokenProcessPool:
                fix = "If no message above has the reason, memory ran out: pass a smaller --batch_size or --processes."
                raise RunFailed(f"A process that scores {model.column.name} ended. {fix}") from None

        return run


@contextlib.contextmanager
def start_workers(devices: Sequence[str]) -> Iterator[Workers]:
    """Yield one process per device, such as `cuda:1`. They are started with the first batches, and end at the end."""
    queue = multiprocessing.get_context("spawn").Queue()
    for device in devices:
        queue.put(device)
    with worker_pool(len(devices), _start, queue, len(devices)) as pool:
        yield Workers(pool)


class _Worker:
    """The state of a worker process: its device, and the model that it scored last."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.revision = ""
        self.model: Any = None

    def open(self, revision: str, load: Callable[[], tuple[Any, Any]]) -> Any:
        """Return the model with this revision on the device. It is loaded once."""
        if self.revision != revision:
            self.model = None  # frees the memory of the last model
            model, _ = load()
            model = model.float().to(self.device)
            self.model = model.eval()
            self.revision = revision
        return self.model


_workers: list[_Worker] = []  # in a worker process: itself


def _start(devices: Any, num_workers: int) -> None:
    import torch

    logging.disable(logging.WARNING)  # the main process has loaded the same models and has said it
    share = torch.get_num_threads() // num_workers
    torch.set_num_threads(max(1, share))
    device = devices.get()
    _workers.append(_Worker(device))


def _score(revision: str, load: Callable[[], tuple[Any, Any]], score: Callable[[Any, Any], Any], batch: Any) -> Any:
    (worker,) = _workers
    model = worker.open(revision, load)
    return score(model, batch)

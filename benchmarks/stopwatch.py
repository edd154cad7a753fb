"""Measure the time of training steps, and count their host syncs."""

import time
import warnings
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Waits(TorchDispatchMode):
    """Count the tensor values that eager code on a CPU reads as Python numbers.

    On a GPU, each such read would be a host sync.
    """

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function._schema.name == "aten::_local_scalar_dense"
        return function(*args, **(kwargs or {}))


class Stopwatch:
    """Measure the mean time of a training step in several windows of `steps` steps.

    After the windows, the host syncs of two more steps are counted. Call `step_ended` at the end of every step.
    """

    def __init__(self, *, warmup: int, steps: int, windows: int, total: int, eager: bool) -> None:
        self.warmup, self.steps, self.windows, self.total, self.eager = warmup, steps, windows, total, eager
        self.done = 0
        self.seconds: list[float] = []  # mean time per step, by window
        self.waits: int | None = None  # number of host syncs
        self.counting: Any = None

    def step_ended(self) -> None:
        self.done += 1
        window, place = divmod(self.done - self.warmup, self.steps)
        if place == 0 and 0 <= window <= self.windows:
            synchronize()
            now = time.perf_counter()
            if window:
                self.seconds.append((now - self.began) / self.steps)
            self.began = time.perf_counter()
            if window == self.windows:
                self._count_waits()
        elif self.done == self.total:
            self._stop_counting()

    def _count_waits(self) -> None:
        if torch.cuda.is_available():
            self.counting = warnings.catch_warnings(record=True)
            self.seen = self.counting.__enter__()
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
        elif self.eager:
            self.counting = Waits()
            self.counting.__enter__()

    def _stop_counting(self) -> None:
        if self.counting is None:
            return
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("default")
            # "called a synchronizing CUDA operation"; a notice about this debug mode is not a sync
            self.waits = sum("called a synchroniz" in str(warning.message) for warning in self.seen)
        else:
            self.waits = self.counting.count
        self.counting.__exit__(None, None, None)


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()

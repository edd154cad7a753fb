"""Measure the time of training steps, and count their host syncs."""

import collections
import json
import time
import warnings
from pathlib import Path
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

    After the windows, the host syncs of two more steps are counted, or with `profile` (a JSON file) the two steps are
    profiled. Call `step_ended` at the end of every step.
    """

    def __init__(self, *, warmup: int, steps: int, windows: int, total: int, eager: bool, profile: str = "") -> None:
        self.profile, self.profiler = profile, torch.profiler.profile()
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
        if self.profile:
            self.profiler.start()
        elif torch.cuda.is_available():
            self.counting = warnings.catch_warnings(record=True)
            self.seen = self.counting.__enter__()
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
        elif self.eager:
            self.counting = Waits()
            self.counting.__enter__()

    def _stop_counting(self) -> None:
        if self.profile:
            synchronize()
            self.profiler.stop()
            Path(self.profile).write_text(json.dumps(largest_kernels(self.profiler.events())), encoding="utf-8")
        if self.counting is None:
            return
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("default")
            # "called a synchronizing CUDA operation"; a notice about this debug mode is not a sync
            self.waits = sum("called a synchroniz" in str(warning.message) for warning in self.seen)
        else:
            self.waits = self.counting.count
        self.counting.__exit__(None, None, None)


def largest_kernels(events: Any) -> dict[str, Any]:
    """Return the 40 largest kernels, and the share of time in which a kernel ran.

    Without a GPU, the operations of the CPU are counted.
    """
    kind = torch.autograd.DeviceType.CUDA if torch.cuda.is_available() else torch.autograd.DeviceType.CPU
    spans = sorted(
        (event.time_range.start, event.time_range.end, event.name) for event in events if event.device_type == kind
    )
    total, calls = collections.Counter[str](), collections.Counter[str]()
    busy, until = 0.0, spans[0][0]
    for start, end, name in spans:
        total[name] += end - start
        calls[name] += 1
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    largest = [{"kernel": name, "ms": total[name] / 1e3, "calls": calls[name]} for name, _ in total.most_common(40)]
    return {"busy": busy / (until - spans[0][0]), "ms": (until - spans[0][0]) / 1e3, "kernels": largest}


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()

"""Measure the time of training steps, and count their host syncs."""

import collections
import contextlib
import json
import time
import warnings
from collections.abc import Iterator
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
    """Measure the mean time of a training step in several windows.

    Call `step_ended` at the end of every step. After the windows, the host syncs of two more steps are counted, or the
    two steps are profiled. `setup` is a `Setup` of train_step.py.
    """

    def __init__(self, setup: Any) -> None:
        self.setup, self.done, self.began, self.rest = setup, 0, 0.0, contextlib.ExitStack()
        self.seconds: list[float] = []  # mean time per step, by window
        self.waits: int | None = None  # number of host syncs

    def step_ended(self) -> None:
        self.done += 1
        window, place = divmod(self.done - self.setup.warmup, self.setup.steps)
        if place == 0 and 0 <= window <= self.setup.windows:
            synchronize()
            if window:
                self.seconds.append((time.perf_counter() - self.began) / self.setup.steps)
            if window == self.setup.windows:
                self.rest.enter_context(self._profiled() if self.setup.profile else self._counted())
            self.began = time.perf_counter()
        elif self.done == self.setup.total_steps:
            self.rest.close()

    @contextlib.contextmanager
    def _profiled(self) -> Iterator[None]:
        with torch.profiler.profile() as profiler:
            yield
            synchronize()
        Path(self.setup.profile).write_text(json.dumps(largest_kernels(profiler.events())), encoding="utf-8")

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        if torch.cuda.is_available():
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                torch.cuda.set_sync_debug_mode("warn")
                yield
                torch.cuda.set_sync_debug_mode("default")
            # "called a synchronizing CUDA operation"; a notice about this debug mode is not a sync
            self.waits = sum("called a synchroniz" in str(warning.message) for warning in seen)
        elif self.setup.compile:
            yield
        else:
            with Waits() as waits:
                yield
            self.waits = waits.count


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

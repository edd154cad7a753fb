"""Measure the time breakdown of a process, the training speed and the memory of its GPU."""

import contextlib
import time
from collections.abc import Iterator
from typing import NamedTuple

import torch

from gpt2_repro.run_record.environment import Environment
from gpt2_repro.run_record.status import process_seconds
from gpt2_repro.run_record.time_breakdown import PARTS, STEPS


class _Reading(NamedTuple):
    """The state of a Meter when it was read last."""

    tokens: int
    trained: float  # seconds
    waited: float  # seconds


class Meter:
    """Measures how this process spends its time, the training speed, and the peak memory of tensors on its GPU.

    MFU is relative to the peak FLOP/s of all devices in bf16. It is not measured in fp32, or if the peak is unknown.

    Args:
        compiled: whether the first step includes the compilation. It then counts as start-up.
    """

    def __init__(self, environment: Environment, *, compiled: bool = False) -> None:
        self._is_compiling = compiled
        self.flops_per_token = environment.flops_per_token
        peak = environment.accelerator.peak_flops if environment.precision != "fp32" else None
        self.peak_flops = peak and peak * environment.plan.num_processes
        self._has_gpu = environment.accelerator.kind == "cuda"
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._seconds["startup"] = process_seconds()
        self._account = "startup"
        self._mark = time.perf_counter()
        self._since: _Reading | None = None
        self._step_tokens = 0
        self._targets = 0
        self._positions = 0

    def start(self, tokens: int) -> None:
        """Begin to measure the speed, unless this is the step that compiles."""
        if self._is_compiling:
            self._is_compiling = False
        elif self._since is None:
            self._book("training")
            self._restart(tokens)

    @contextlib.contextmanager
    def on(self, account: str) -> Iterator[None]:
        """Add the time of the `with` block, without nested blocks, to a part."""
        outer = self._account
        self._book(account)
        try:
            yield
        finally:
            self._book(outer)

    def _book(self, following: str) -> None:
        now = time.perf_counter()
        self._seconds[self._account] += now - self._mark
        self._account = following
        self._mark = now

    def seconds(self, *parts: str) -> float:
        """Return the seconds of this process in some parts of the time breakdown."""
        self._book(self._account)
        return sum(self._seconds[part] for part in parts)

    def time_breakdown(self) -> dict[str, float]:
        """Return the seconds of this process in each part of the time breakdown."""
        return {name: self.seconds(name) for name in PARTS}

    def count(self, targets: int, positions: int) -> None:
        """Add the targets and positions (with padding) of one step."""
        self._step_tokens = targets
        self._targets += targets
        self._positions += positions

    def read(self, tokens: int) -> dict[str, float]:
        """Return the training speed and the peak memory since the last call, as metrics for the log.

        data_wait is the share of the time in which the process waited for rows. `tokens` are trained so far.
        """
        line = self._memory()
        if self._since is None:
            return line
        seconds = self.seconds(*STEPS) - self._since.trained
        speed = (tokens - self._since.tokens) / seconds
        waiting = (self.seconds("data") - self._since.waited) / seconds
        line |= {"tokens_per_second": round(speed, 1), "data_wait": round(waiting, 4)}
        if self.peak_flops:
            line["mfu"] = round(speed * self.flops_per_token / self.peak_flops, 4)
        if self._positions:
            line["step_tokens"] = self._step_tokens
            line["padding"] = round(1 - self._targets / self._positions, 4)
        self._restart(tokens)
        return line

    def _memory(self) -> dict[str, float]:
        """Return the peak memory of tensors on the GPU since the last call, or {} without a GPU."""
        if not self._has_gpu:
            return {}
        peak = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return {"peak_memory_gb": round(peak / 1e9, 2)}

    def _restart(self, tokens: int) -> None:
        self._since = _Reading(tokens, self.seconds(*STEPS), self.seconds("data"))
        self._targets = 0
        self._positions = 0

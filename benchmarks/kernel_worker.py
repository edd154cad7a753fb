"""Measure the kernels of kernel_plan.py one after another. kernels.py starts it, and reads the results from a file."""

import functools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import kernel_candidates, kernel_plan
from benchmarks.gpu_results import append_line
from benchmarks.gpu_variants import cutlass_folders
from benchmarks.kernel_candidates import Passes
from benchmarks.kernel_plan import CURRENT, PRODUCTS, Candidate, Shapes, obstacle
from benchmarks.kernel_reference import Reference, errors_of, fault_of, reference_of, results_of
from gpt2_repro.errors import in_a_line


SAMPLE_SECONDS = 0.4  # samples of one function
FEWEST_SAMPLES = 5
MOST_SAMPLES = 50
FLUSHED_BYTES = 2**28  # larger than the L2 cache of any GPU
Step = Callable[[], object]  # a forward and backward pass


def time_in_turn(functions: list[Step], device: str) -> list[float]:
    """Return the median milliseconds of functions, which run in turn, so that all of them have the same clock rate."""
    longest = 0.0
    for function in functions:
        _seconds(function, device)  # warm-up
        longest = max(longest, _seconds(function, device))
    samples = int(SAMPLE_SECONDS / longest)
    samples = min(MOST_SAMPLES, max(FEWEST_SAMPLES, samples))
    rounds: list[list[float]] = []
    if device == "cpu":
        for _ in range(samples):
            rounds.append([1e3 * _seconds(function, device) for function in functions])
    else:
        rounds = _cuda_rounds(functions, samples)
    return [statistics.median(times) for times in zip(*rounds, strict=True)]


def _seconds(function: Step, device: str) -> float:
    began = time.perf_counter()
    function()
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def _cuda_rounds(functions: list[Step], samples: int) -> list[list[float]]:
    """Return the milliseconds of each function in each round.

    The host does not wait between samples, so that it is ahead of the device.
    """
    flushed = torch.empty(FLUSHED_BYTES, dtype=torch.int8, device="cuda")
    starts: list[torch.cuda.Event] = []
    ends: list[torch.cuda.Event] = []
    for _ in range(samples):
        for function in functions:
            start = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            flushed.zero_()  # replaces the tensors of the last call in the L2 cache
            start.record()
            function()
            end.record()
            starts.append(start)
            ends.append(end)
    torch.cuda.synchronize()
    times = [start.elapsed_time(end) for start, end in zip(starts, ends, strict=True)]
    count = len(functions)
    return [times[first : first + count] for first in range(0, len(times), count)]


class Worker:
    """Measure candidates on a device, with the same tensors for each group."""

    def __init__(self, shapes: Shapes, device: str) -> None:
        self.shapes = shapes
        self.device = device
        self.references: dict[str, Reference] = {}
        self.current: dict[str, Step | None] = {}  # steps of the current kernels, by group

    def reference(self, group: str) -> Reference:
        """Return the right results of a group, which are computed once."""
        if group not in self.references:
            self.references[group] = reference_of(group, self.shapes, self.device)
        return self.references[group]

    def measure(self, candidate: Candidate) -> dict[str, Any]:
        """Return the errors and the time of a candidate, and the ratio of its time to that of the current kernel."""
        group = candidate.group
        make = getattr(kernel_candidates, candidate.make)
        if group == PRODUCTS:
            return self.measure_products(make)
        problem, expected, yardstick = self.reference(group)
        function = make(self.shapes)
        errors = errors_of(results_of(function, problem), expected)
        step = functools.partial(results_of, function, problem)
        if CURRENT[group, self.device] == candidate.name:
            self.current[group] = step
        values: dict[str, Any] = {"largest_error": max(errors.largest), "bf16_error": max(yardstick.largest)}
        current = self.current_step(group)
        if current is None:
            [values["ms"]] = time_in_turn([step], self.device)
        elif current is step:
            [values["ms"]] = time_in_turn([step], self.device)
            values["ratio"] = 1.0
        else:
            values["ms"], current_ms = time_in_turn([step, current], self.device)
            values["ratio"] = values["ms"] / current_ms
        fault = fault_of(errors, yardstick)
        if fault is not None:
            values["wrong"] = fault
        return values

    def current_step(self, group: str) -> Step | None:
        """Return the step of the kernel that train.py uses, or None if it fails.

        It is made again if an earlier process has measured it. See also `forget_failed`.
        """
        if group not in self.current:
            self.current[group] = None
            name = CURRENT[group, self.device]
            [candidate] = [each for each in kernel_plan.CANDIDATES if (each.group, each.name) == (group, name)]
            make = getattr(kernel_candidates, candidate.make)
            problem = self.reference(group).problem
            try:
                step = functools.partial(results_of, make(self.shapes), problem)
                step()
                self.current[group] = step
            except Exception as error:
                print(f"{group}, {name}: {in_a_line(error)}", file=sys.stderr)
        return self.current[group]

    def forget_failed(self, entries: list[dict[str, Any]]) -> None:
        """Do not try current kernels again that failed or hung in an earlier process."""
        for entry in entries:
            is_current = CURRENT.get((entry["group"], self.device)) == entry["name"]
            if is_current and "error" in entry:
                self.current[entry["group"]] = None

    def measure_products(self, make: Callable[..., Passes]) -> dict[str, Any]:
        """Compare the products of a layer with those of twice as many rows, by their time per row."""
        once = make(self.shapes.tokens, self.shapes, self.device)
        twice = make(2 * self.shapes.tokens, self.shapes, self.device)
        times = time_in_turn([*once.products, *twice.products], self.device)
        once_ms = times[:3]
        twice_ms = times[3:]
        return {
            "ms": sum(twice_ms),
            "ratio": sum(twice_ms) / (2 * sum(once_ms)),
            "ms_of_half": sum(once_ms),
            "teraflops": [round(twice.flops / ms / 1e9, 1) for ms in twice_ms],
            "teraflops_of_half": [round(once.flops / ms / 1e9, 1) for ms in once_ms],
        }

    def is_broken(self) -> bool:
        """Return whether the device reports an error, after which a process cannot use it."""
        if self.device == "cpu":
            return False
        try:
            torch.cuda.synchronize()
        except Exception:
            return True
        return False


def main(results: Path, shapes: Shapes, device: str, deadline: float) -> None:
    """Measure the candidates that have no result until the time is over, and append their results to a file.

    Args:
        deadline: in seconds since the epoch.
    """
    sys.path.extend(cutlass_folders())
    worker = Worker(shapes, device)
    entries: list[dict[str, Any]] = []
    if results.is_file():
        entries = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    worker.forget_failed(entries)
    for candidate in kernel_plan.without_result(entries):
        entry: dict[str, Any] = {"group": candidate.group, "name": candidate.name}
        left = deadline - time.time()
        problem = obstacle(candidate, device)
        if problem is None and left < candidate.seconds:
            problem = f"it was not tried: it may take {candidate.seconds} s, and {max(0, left):.0f} s are left"
        if problem is not None:
            append_line(results, entry | {"error": problem})
            continue
        append_line(results, entry | {"started": time.time()})
        try:
            values = worker.measure(candidate)
        except Exception as error:  # packages of kernels raise errors of their own
            values = {"error": f"{type(error).__name__}: {in_a_line(error)[:300]}"}
        append_line(results, entry | values)
        if "error" in values and worker.is_broken():
            sys.exit("The device has failed. The next process continues.")
        if device != "cpu":
            torch.cuda.empty_cache()

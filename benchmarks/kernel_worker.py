"""Measure the kernels of kernel_plan.py one after another. kernels.py starts it, and reads the results from a file."""

import functools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, gelu

from benchmarks import kernel_candidates, kernel_plan
from benchmarks.gpu_results import append_line
from benchmarks.gpu_variants import cutlass_folders
from benchmarks.kernel_candidates import Passes
from benchmarks.kernel_plan import CURRENT, PRODUCTS, Candidate, Shapes, obstacle
from gpt2_repro.errors import in_a_line
from gpt2_repro.tokens import IGNORED


# A result is wrong if its error is larger than this many times that of torch's bf16, and larger than TOLERATED.
MOST_TIMES = 3.0
TOLERATED = 1e-3
PARTS = 16  # the reference is computed for so many parts of the rows, because it stores all intermediate results
SAMPLE_SECONDS = 0.4  # samples of one function
FEWEST_SAMPLES = 5
MOST_SAMPLES = 50
FLUSHED_BYTES = 2**28  # larger than the L2 cache of any GPU


class Problem(NamedTuple):
    """The tensors of a group of candidates, and a plain function with the right results.

    Candidates take the tensors `by_row`, then the weights. Tensors that require gradients are trained: the first one of
    `by_row`, and all weights.
    """

    by_row: list[Tensor]
    weights: list[Tensor]
    grad_output: Tensor
    plain: Callable[..., Tensor]

    def parts(self) -> Iterator[tuple[list[Tensor], Tensor]]:
        """Yield parts of `by_row`, and the gradients of their outputs."""
        rows = len(self.by_row[0])
        size = -(-rows // PARTS)
        for start in range(0, rows, size):
            part = [tensor[start : start + size] for tensor in self.by_row]
            grad_output = self.grad_output
            if grad_output.dim() > 0:  # otherwise the output is a sum over all rows
                grad_output = grad_output[start : start + size]
            yield part, grad_output


def plain_attention(projection: Tensor, *, heads: int) -> Tensor:
    rows, length, _ = projection.shape
    joint = projection.view(rows, length, 3, heads, -1)
    query, key, value = joint.permute(2, 0, 3, 1, 4).unbind()
    scores = query @ key.transpose(2, 3) * query.shape[-1] ** -0.5
    later = torch.ones(length, length, dtype=torch.bool, device=scores.device).triu(1)
    probabilities = scores.masked_fill(later, -torch.inf).softmax(-1)
    out = probabilities @ value
    return out.transpose(1, 2).flatten(2)


def plain_mlp(inputs: Tensor, up_weight: Tensor, up_bias: Tensor, down_weight: Tensor, down_bias: Tensor) -> Tensor:
    after = gelu(inputs @ up_weight + up_bias, approximate="tanh")
    return after @ down_weight + down_bias


def plain_loss(hidden: Tensor, labels: Tensor, weight: Tensor, *, vocab_size: int) -> Tensor:
    logits = (hidden @ weight.T)[:, :vocab_size]
    return cross_entropy(logits.float(), labels, reduction="sum", ignore_index=IGNORED)


def problem_of(group: str, shapes: Shapes, device: str) -> Problem:
    """Return random tensors for a group of candidates, in bf16."""
    torch.manual_seed(0)
    width = shapes.width

    def normal(*sizes: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*sizes, device=device) * scale).to(torch.bfloat16)

    if group == "attention":
        projection = normal(shapes.rows, shapes.length, 3 * width).requires_grad_()
        grad_output = normal(shapes.rows, shapes.length, width)
        plain = functools.partial(plain_attention, heads=shapes.heads)
        return Problem([projection], [], grad_output, plain)
    if group == "MLP":
        inputs = normal(shapes.rows, shapes.length, width).requires_grad_()
        weights = [
            normal(width, 4 * width, scale=width**-0.5),
            normal(4 * width),
            normal(4 * width, width, scale=(4 * width) ** -0.5),
            normal(width),
        ]
        for weight in weights:
            weight.requires_grad_()
        grad_output = normal(shapes.rows, shapes.length, width)
        return Problem([inputs], weights, grad_output, plain_mlp)
    hidden = normal(shapes.tokens, width).requires_grad_()
    labels = torch.randint(shapes.vocab_size, (shapes.tokens,), device=device)
    labels[::16] = IGNORED
    weight = normal(shapes.padded_vocab_size, width, scale=width**-0.5).requires_grad_()
    grad_loss = torch.tensor(1 / shapes.tokens, device=device)
    plain = functools.partial(plain_loss, vocab_size=shapes.vocab_size)
    return Problem([hidden, labels], [weight], grad_loss, plain)


def results_of(function: Callable[..., Tensor], problem: Problem) -> list[Tensor]:
    """Return the output and the gradients. A function whose results are not contiguous pays for their copies."""
    tensors = [*problem.by_row, *problem.weights]
    trained = [tensor for tensor in tensors if tensor.requires_grad]
    output = function(*tensors)
    gradients = torch.autograd.grad(output, trained, problem.grad_output.to(output.dtype))
    return [output.detach().contiguous(), *[gradient.contiguous() for gradient in gradients]]


def plain_results(problem: Problem, dtype: torch.dtype) -> list[Tensor]:
    """Return the output and the gradients of the plain function, computed in a dtype. The results are fp32."""
    outputs: list[Tensor] = []
    row_gradients: list[Tensor] = []
    weights = [weight.detach().to(dtype).requires_grad_() for weight in problem.weights]
    weight_gradients = [torch.zeros_like(weight, dtype=torch.float32) for weight in weights]
    for [first, *others], grad_output in problem.parts():
        trained = first.detach().to(dtype).requires_grad_()
        output = problem.plain(trained, *others, *weights)
        gradients = torch.autograd.grad(output, [trained, *weights], grad_output.to(output.dtype))
        outputs.append(output.detach())
        row_gradients.append(gradients[0])
        for total, gradient in zip(weight_gradients, gradients[1:], strict=True):
            total += gradient
    if outputs[0].dim() == 0:
        output = torch.stack(outputs).sum()
    else:
        output = torch.cat(outputs)
    rounded = [gradient.to(dtype) for gradient in weight_gradients]
    results = [output, torch.cat(row_gradients), *rounded]
    return [result.float() for result in results]


class Errors(NamedTuple):
    """Errors of an output and its gradients, relative to the expected values."""

    largest: list[float]  # the largest difference relative to the largest expected value
    rms: list[float]  # relative to the root mean square of the expected values


def errors_of(results: list[Tensor], expected: list[Tensor]) -> Errors:
    """Compare results with the expected ones. Raises ValueError for a wrong shape."""
    largest: list[float] = []
    rms: list[float] = []
    for result, target in zip(results, expected, strict=True):
        if result.shape != target.shape:
            raise ValueError(f"The shape is {list(result.shape)} instead of {list(target.shape)}.")
        difference = result.float() - target
        worst = difference.abs().max() / target.abs().max()
        mean = difference.norm() / target.norm()
        largest.append(float(worst.nan_to_num(torch.inf)))
        rms.append(float(mean.nan_to_num(torch.inf)))
    return Errors(largest, rms)


def fault_of(errors: Errors, yardstick: Errors) -> str | None:
    """Return in which result an error is too large, or None. `yardstick` has the errors of torch's bf16."""
    for kind in ("largest", "rms"):
        pairs = zip(getattr(errors, kind), getattr(yardstick, kind), strict=True)
        for number, (error, usual) in enumerate(pairs):
            if error > max(TOLERATED, MOST_TIMES * usual):
                name = "output"
                if number > 0:
                    name = f"gradient {number}"
                return f"{kind} error of the {name}: {error:.2g}, torch's bf16 has {usual:.2g}"
    return None


def time_in_turn(functions: list[Callable[[], object]], device: str) -> list[float]:
    """Return the median milliseconds of functions, which are called in turn, so that they meet the same clock rate."""
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


def _seconds(function: Callable[[], object], device: str) -> float:
    began = time.perf_counter()
    function()
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def _cuda_rounds(functions: list[Callable[[], object]], samples: int) -> list[list[float]]:
    """Return the milliseconds of each function in each round.

    The host does not wait between samples, so that it is ahead of the device.
    """
    flushed = torch.empty(FLUSHED_BYTES, dtype=torch.int8, device="cuda")
    rounds: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = []
    for _ in range(samples):
        events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        for function in functions:
            start = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            flushed.zero_()  # replaces the tensors of the last call in the L2 cache
            start.record()
            function()
            end.record()
            events.append((start, end))
        rounds.append(events)
    torch.cuda.synchronize()
    return [[start.elapsed_time(end) for start, end in events] for events in rounds]


class Reference(NamedTuple):
    """The tensors of a group, the expected results in fp32, and the errors of torch's bf16."""

    problem: Problem
    expected: list[Tensor]
    yardstick: Errors


class Worker:
    """Measure candidates on a device, with the same tensors for each group."""

    def __init__(self, shapes: Shapes, device: str) -> None:
        self.shapes = shapes
        self.device = device
        self.references: dict[str, Reference] = {}
        self.used_now: dict[str, Callable[[], object] | None] = {}  # steps by group

    def reference(self, group: str) -> Reference:
        if group not in self.references:
            problem = problem_of(group, self.shapes, self.device)
            expected = plain_results(problem, torch.float32)
            rounded = plain_results(problem, torch.bfloat16)
            self.references[group] = Reference(problem, expected, errors_of(rounded, expected))
        return self.references[group]

    def measure(self, candidate: Candidate) -> dict[str, Any]:
        """Return the errors and the time of a candidate, and its time relative to what is used now."""
        group = candidate.group
        make = getattr(kernel_candidates, candidate.make)
        if group == PRODUCTS:
            return self.measure_products(make)
        problem, expected, yardstick = self.reference(group)
        function = make(self.shapes)
        errors = errors_of(results_of(function, problem), expected)
        step = functools.partial(results_of, function, problem)
        if CURRENT[group, self.device] == candidate.name:
            self.used_now[group] = step
        values: dict[str, Any] = {"largest_error": max(errors.largest), "bf16_error": max(yardstick.largest)}
        used_now = self.step_used_now(group)
        if used_now is None:
            [values["ms"]] = time_in_turn([step], self.device)
        elif used_now is step:
            [values["ms"]] = time_in_turn([step], self.device)
            values["ratio"] = 1.0
        else:
            values["ms"], current_ms = time_in_turn([step, used_now], self.device)
            values["ratio"] = values["ms"] / current_ms
        fault = fault_of(errors, yardstick)
        if fault is not None:
            values["wrong"] = fault
        return values

    def step_used_now(self, group: str) -> Callable[[], object] | None:
        """Return the step of the candidate that is used now, or None if it fails.

        It is made again if another process has measured it.
        """
        if group not in self.used_now:
            self.used_now[group] = None
            name = CURRENT[group, self.device]
            [candidate] = [each for each in kernel_plan.CANDIDATES if (each.group, each.name) == (group, name)]
            make = getattr(kernel_candidates, candidate.make)
            problem = self.reference(group).problem
            try:
                step = functools.partial(results_of, make(self.shapes), problem)
                step()
                self.used_now[group] = step
            except Exception as error:
                print(f"{group}, {name}: {in_a_line(error)}", file=sys.stderr)
        return self.used_now[group]

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

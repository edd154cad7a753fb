"""The tensors of the candidates of kernel_plan.py, the right results, and the errors of others."""

import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, gelu

from benchmarks.kernel_plan import Shapes
from gpt2_repro.tokens import IGNORED


# A result is wrong if its error is larger than this many times that of torch's bf16, and larger than TOLERATED.
MOST_TIMES = 3.0
TOLERATED = 1e-3
PARTS = 16  # the reference is computed for so many parts of the rows, because it stores all intermediate results


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
    scale = query.shape[-1] ** -0.5
    scores = query @ key.transpose(2, 3) * scale
    is_later = torch.ones(length, length, dtype=torch.bool, device=scores.device).triu(1)
    scores = scores.masked_fill(is_later, -torch.inf)
    probabilities = scores.softmax(-1)
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
    if group == "attention":
        return attention_problem(shapes, device)
    if group == "MLP":
        return mlp_problem(shapes, device)
    return loss_problem(shapes, device)


def normal(sizes: list[int], device: str, scale: float = 1.0) -> Tensor:
    values = torch.randn(sizes, device=device) * scale
    return values.to(torch.bfloat16)


def attention_problem(shapes: Shapes, device: str) -> Problem:
    projection = normal([shapes.rows, shapes.length, 3 * shapes.width], device)
    projection.requires_grad_()
    grad_output = normal([shapes.rows, shapes.length, shapes.width], device)
    plain = functools.partial(plain_attention, heads=shapes.heads)
    return Problem([projection], [], grad_output, plain)


def mlp_problem(shapes: Shapes, device: str) -> Problem:
    width = shapes.width
    inner = 4 * width
    inputs = normal([shapes.rows, shapes.length, width], device)
    up_weight = normal([width, inner], device, width**-0.5)
    up_bias = normal([inner], device)
    down_weight = normal([inner, width], device, inner**-0.5)
    down_bias = normal([width], device)
    weights = [up_weight, up_bias, down_weight, down_bias]
    for tensor in (inputs, *weights):
        tensor.requires_grad_()
    grad_output = normal([shapes.rows, shapes.length, width], device)
    return Problem([inputs], weights, grad_output, plain_mlp)


def loss_problem(shapes: Shapes, device: str) -> Problem:
    hidden = normal([shapes.tokens, shapes.width], device)
    hidden.requires_grad_()
    weight = normal([shapes.padded_vocab_size, shapes.width], device, shapes.width**-0.5)
    weight.requires_grad_()
    labels = torch.randint(shapes.vocab_size, (shapes.tokens,), device=device)
    labels[::16] = IGNORED
    grad_loss = torch.tensor(1 / shapes.tokens, device=device)
    plain = functools.partial(plain_loss, vocab_size=shapes.vocab_size)
    return Problem([hidden, labels], [weight], grad_loss, plain)


def results_of(function: Callable[..., Tensor], problem: Problem) -> list[Tensor]:
    """Return the output and the gradients. A function whose results are not contiguous pays for their copies."""
    output = function(*problem.by_row, *problem.weights)
    trained = [problem.by_row[0], *problem.weights]
    gradients = torch.autograd.grad(output, trained, problem.grad_output.to(output.dtype))
    results = [output.detach(), *gradients]
    return [result.contiguous() for result in results]


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
    """Compare results with the expected ones. torch has checked that the shapes are equal."""
    largest: list[float] = []
    rms: list[float] = []
    for result, target in zip(results, expected, strict=True):
        difference = result.float() - target
        worst = difference.abs().max() / target.abs().max()
        mean = difference.norm() / target.norm()
        largest.append(float(worst.nan_to_num(torch.inf)))
        rms.append(float(mean.nan_to_num(torch.inf)))
    return Errors(largest, rms)


def fault_of(errors: Errors, yardstick: Errors) -> str | None:
    """Return which result has too large an error, or None. `yardstick` has the errors of torch's bf16."""
    names = ["output"]
    names += [f"gradient {number}" for number in range(1, len(errors.rms))]
    for name, error, usual in zip(names, errors.largest, yardstick.largest, strict=True):
        if error > max(TOLERATED, MOST_TIMES * usual):
            return f"largest error of the {name}: {error:.2g}, torch's bf16 has {usual:.2g}"
    for name, error, usual in zip(names, errors.rms, yardstick.rms, strict=True):
        if error > max(TOLERATED, MOST_TIMES * usual):
            return f"rms error of the {name}: {error:.2g}, torch's bf16 has {usual:.2g}"
    return None


class Reference(NamedTuple):
    """The tensors of a group, the expected results in fp32, and the errors of torch's bf16."""

    problem: Problem
    expected: list[Tensor]
    yardstick: Errors


def reference_of(group: str, shapes: Shapes, device: str) -> Reference:
    problem = problem_of(group, shapes, device)
    expected = plain_results(problem, torch.float32)
    rounded = plain_results(problem, torch.bfloat16)
    yardstick = errors_of(rounded, expected)
    return Reference(problem, expected, yardstick)

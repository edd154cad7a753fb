"""The comparison of kernels: references, wrong and failing candidates, missing packages, hangs and crashes."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, gelu, one_hot, scaled_dot_product_attention

from benchmarks import kernel_candidates, kernel_plan, kernel_reference, kernel_worker, kernels
from benchmarks.kernel_plan import SMALL, Candidate
from benchmarks.processes import ROOT
from gpt2_repro.model import pretraining


REHEARSAL = str(Path(__file__).with_name("rehearse_kernels.py"))
WIDTH = SMALL.width


def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return causal attention of tensors [rows, T, heads, head size], computed by torch."""
    heads_first = [tensor.transpose(1, 2) for tensor in (query, key, value)]
    out = scaled_dot_product_attention(*heads_first, is_causal=True)
    return out.transpose(1, 2)


def packed(projection: Tensor, heads: int) -> Tensor:
    joint = projection.view(*projection.shape[:2], 3, heads, -1)
    return attention(*joint.unbind(2)).flatten(2)


def qkvpacked(joint: Tensor, *, causal: bool) -> Tensor:
    assert causal and joint.shape == (SMALL.rows, SMALL.length, 3, SMALL.heads, SMALL.head_size)
    return attention(*joint.unbind(2))


def flash4_forward(
    *joint: Tensor, softmax_scale: float, causal: bool, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor]:
    assert causal and softmax_scale == SMALL.head_size**-0.5
    out.copy_(attention(*joint))
    return out, lse


# Operators are called without autograd, so these gradients are computed by hand.
def flash4_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    gradient: Tensor,
    lse: Tensor,
    *,
    softmax_scale: float,
    causal: bool,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
) -> None:
    query, key, value, out, gradient = (x.transpose(1, 2).float() for x in (query, key, value, out, gradient))
    later = torch.ones(SMALL.length, SMALL.length, dtype=torch.bool).triu(1)
    scores = query @ key.mT * softmax_scale
    probabilities = scores.masked_fill(later, -torch.inf).softmax(-1)
    common = (gradient * out).sum(-1, keepdim=True)
    grad_scores = probabilities * (gradient @ value.mT - common) * softmax_scale
    dq.copy_((grad_scores @ key).transpose(1, 2))
    dk.copy_((grad_scores.mT @ query).transpose(1, 2))
    dv.copy_((probabilities.mT @ gradient).transpose(1, 2))


def gelu_mlp(inputs: Tensor, up_weight: Tensor, up_bias: Tensor, down_weight: Tensor, down_bias: Tensor) -> Tensor:
    assert inputs.shape == (SMALL.tokens, WIDTH)
    return kernel_reference.plain_mlp(inputs, up_weight, up_bias, down_weight, down_bias)


def gemm_act(inputs: Tensor, weight: Tensor, *, bias: Tensor, activation: str, tuned: bool) -> tuple[Tensor, Tensor]:
    assert activation == "gelu_tanh_approx"
    before = inputs @ weight + bias
    return before, gelu(before, approximate="tanh")


def dgelu_dbias(gradient: Tensor, weight: Tensor, before: Tensor, *, tuned: bool) -> dict[str, Tensor]:
    grad_before = torch.ops.aten.gelu_backward(gradient @ weight, before, approximate="tanh")
    after = gelu(before, approximate="tanh")
    return {"D": grad_before, "postact": after, "dbias": grad_before.float().sum(0)}


def cross_entropy_fwd_out(
    logits: Tensor, labels: Tensor, target_logit: None, losses: Tensor, lse: None, gradient: Tensor, weight: None
) -> None:
    values = cross_entropy(logits.float(), labels, reduction="none")
    probabilities = logits.float().softmax(1)
    targets = one_hot(labels.clamp_min(0), logits.shape[1])
    losses.copy_(values)
    gradient.copy_((probabilities - targets) * (labels >= 0).unsqueeze(1))


def liger(**options: Any) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    assert options == {"ignore_index": -100, "reduction": "sum", "accum_dtype": torch.float32}

    def loss(weight: Tensor, hidden: Tensor, labels: Tensor) -> Tensor:
        return kernel_reference.plain_loss(hidden, labels, weight, vocab_size=SMALL.vocab_size)

    return loss


def whole_attention(projection: Tensor) -> Tensor:
    return packed(projection, SMALL.heads)


def whole_loss(hidden: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
    logits = hidden @ weight[: SMALL.vocab_size].T
    return cross_entropy(logits, labels, reduction="sum")


DOUBLES = {"attention": whole_attention, "MLP": kernel_reference.plain_mlp, "loss": whole_loss}
FAKES = {
    "gpt2_repro.model.packed_attention": SimpleNamespace(packed_attention=packed),
    "gpt2_repro.model.gelu_products": SimpleNamespace(gelu_mlp=gelu_mlp),
    "flash_attn.flash_attn_interface": SimpleNamespace(flash_attn_qkvpacked_func=qkvpacked),
    "flash_attn.cute.interface": SimpleNamespace(_flash_attn_fwd=flash4_forward, _flash_attn_bwd=flash4_backward),
    "quack.gemm_interface": SimpleNamespace(gemm_act=gemm_act),
    "quack.epilogue.library": SimpleNamespace(dgelu_dbias_mod=dgelu_dbias),
    "quack.cross_entropy": SimpleNamespace(cross_entropy_fwd_out=cross_entropy_fwd_out),
    "liger_kernel.transformers.fused_linear_cross_entropy": SimpleNamespace(LigerFusedLinearCrossEntropyLoss=liger),
}
WITH_REFERENCE = [each for each in kernel_plan.CANDIDATES if each.group != kernel_plan.PRODUCTS]


@pytest.fixture(scope="module")
def worker() -> kernel_worker.Worker:
    return kernel_worker.Worker(SMALL, "cpu")


@pytest.mark.parametrize("group", ["attention", "MLP", "loss"])
def test_references_equal_double_precision(group: str, worker: kernel_worker.Worker) -> None:
    problem, expected, yardstick = worker.reference(group)
    exact = [tensor.detach().double() for tensor in problem.weights]
    first, *others = problem.by_row
    tensors = [first.detach().double(), *others, *exact]
    for tensor in tensors:
        tensor.requires_grad_(tensor.is_floating_point())
    output = DOUBLES[group](*tensors)
    trained = [tensor for tensor in tensors if tensor.requires_grad]
    gradients = torch.autograd.grad(output, trained, problem.grad_output.to(output.dtype))
    for result, target in zip(expected, [output, *gradients], strict=True):
        torch.testing.assert_close(result.double(), target, rtol=1e-4, atol=1e-5)
    assert 0.001 < max(yardstick.largest) < 0.02


@pytest.mark.parametrize("candidate", WITH_REFERENCE, ids=lambda each: f"{each.group}, {each.name}")
def test_candidates_compute_the_same(
    candidate: Candidate, worker: kernel_worker.Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, module in FAKES.items():
        monkeypatch.setitem(sys.modules, name, module)
    if candidate.make == "quack_loss":
        # On a CPU the loss would not call the kernel.
        monkeypatch.setattr(pretraining, "TRITON_DEVICES", ("cpu",))
    problem, expected, yardstick = worker.reference(candidate.group)
    function = getattr(kernel_candidates, candidate.make)(SMALL)
    results = kernel_reference.results_of(function, problem)
    assert kernel_reference.fault_of(kernel_reference.errors_of(results, expected), yardstick) is None
    tensors = [tensor for tensor in (*problem.by_row, *problem.weights) if tensor.requires_grad]
    for tensor, gradient in zip(tensors, results[1:], strict=True):
        assert gradient.stride() == tensor.stride() and gradient.dtype == torch.bfloat16


def scaled_gradient(shapes: kernel_plan.Shapes) -> Callable[..., Tensor]:
    """Return a candidate with the right output, and a gradient of the inputs that is 2 % too large."""

    def mlp(inputs: Tensor, *weights: Tensor) -> Tensor:
        constant = inputs.detach()
        scaled = constant + 1.02 * (inputs - constant)
        return kernel_reference.plain_mlp(scaled, *weights)

    return mlp


def strange_shape(shapes: kernel_plan.Shapes) -> Callable[..., Tensor]:
    return lambda projection: packed(projection, shapes.heads).flatten(0, 1).unsqueeze(0)


def failing(shapes: kernel_plan.Shapes) -> Callable[..., Tensor]:
    raise RuntimeError("no kernel image is available\nfor execution on the device")


PLANTED = (
    Candidate("MLP", "torch", "torch_mlp", gpu=False),
    Candidate("MLP", "wrong", "scaled_gradient", gpu=False),
    Candidate("MLP", "without a package", "torch_mlp", "no_such_package"),
    Candidate("MLP", "failing", "failing", gpu=False),
    Candidate("MLP", "slow", "torch_mlp", gpu=False, seconds=1000),
    Candidate("attention", "strange", "strange_shape", gpu=False),
    Candidate("attention", "causal_sdpa", "causal_sdpa", gpu=False),
    Candidate(kernel_plan.PRODUCTS, "lm_head", "products_of_head", gpu=False),
)


def test_wrong_and_failing_candidates_are_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_plan, "CANDIDATES", PLANTED)
    monkeypatch.setattr(kernel_worker, "SAMPLE_SECONDS", 0.01)
    for function in (scaled_gradient, strange_shape, failing):
        monkeypatch.setattr(kernel_candidates, function.__name__, function, raising=False)
    results = tmp_path / "kernels.jsonl"
    kernel_worker.main(results, SMALL, "cpu", time.time() + 100)
    lines = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    entries = {line["name"]: line for line in lines if "started" not in line}
    assert list(entries) == [candidate.name for candidate in PLANTED]
    assert entries["wrong"]["wrong"].startswith("largest error of the gradient 1: 0.019")
    assert entries["without a package"]["error"] == "no_such_package is not installed"
    assert entries["failing"]["error"].startswith("RuntimeError: no kernel image is available for")
    assert entries["slow"]["error"].startswith("it was not tried: it may take 1000 s")
    assert entries["strange"]["error"].startswith("RuntimeError: Mismatch in shape")
    assert entries["torch"]["ratio"] == entries["causal_sdpa"]["ratio"] == 1
    assert entries["lm_head"]["ms"] > 0 and len(entries["lm_head"]["teraflops"]) == 3
    entries["wrong"]["ms"] = 0.001
    fastest = kernels.conclusions(list(entries.values()))
    assert fastest[0].startswith("- Fastest attention: causal_sdpa") and fastest[1].startswith("- Fastest MLP: torch,")
    assert "WRONG: largest error of the gradient 1" in kernels.cells_of(entries["wrong"])[-1]


def test_a_current_kernel_that_failed_is_not_tried_again(worker: kernel_worker.Worker) -> None:
    new = kernel_worker.Worker(SMALL, "cpu")
    new.references = worker.references
    new.forget_failed([{"group": "MLP", "name": "torch", "error": "it was killed"}])
    assert new.current_step("MLP") is None and new.current_step("attention") is not None


def rehearse(folder: Path, *words: str, **environment: str) -> dict[str, dict[str, Any]]:
    """Run kernels.py with a fake process, and return its results."""
    command = [sys.executable, REHEARSAL, "--out", str(folder), *words]
    subprocess.run(command, cwd=ROOT, env=os.environ | environment, check=True, timeout=60)
    lines = (folder / "kernels.jsonl").read_text(encoding="utf-8").splitlines()
    entries = [json.loads(line) for line in lines]
    results = {f"{entry['group']}, {entry['name']}": entry for entry in entries if "started" not in entry}
    assert len(results) == len(kernel_plan.CANDIDATES)
    return results


def test_a_hang_and_a_crash_are_one_line_each(tmp_path: Path) -> None:
    results = rehearse(tmp_path, KERNEL_HANGS="packed_attention", KERNEL_CRASHES="Liger", KERNEL_WRONG="causal_sdpa")
    failed = {name: entry["error"] for name, entry in results.items() if "error" in entry}
    assert failed.pop("attention, packed_attention").startswith("it was killed after")
    assert failed == {"loss, Liger": "the process ended with exit code -9, see kernels_worker.log"}
    table = (tmp_path / "kernels.md").read_text(encoding="utf-8")
    assert "Fastest attention: FlashAttention-4" in table and "two passes (0.500)" in table


def test_a_process_that_cannot_start_is_not_started_again(tmp_path: Path) -> None:
    results = rehearse(tmp_path, WORKER_FAILS="1")
    assert {entry["error"] for entry in results.values()} == {
        "the process ended with exit code 1, see kernels_worker.log"
    }


def test_nothing_starts_without_time(tmp_path: Path) -> None:
    results = rehearse(tmp_path, "--seconds", "5")
    assert {entry["error"] for entry in results.values()} == {"no time is left"}


def test_each_group_has_a_kernel_that_is_used_now() -> None:
    names = {(candidate.group, candidate.name): candidate for candidate in kernel_plan.CANDIDATES}
    assert len(names) == len(kernel_plan.CANDIDATES)
    for (group, device), name in kernel_plan.CURRENT.items():
        assert device == "cuda" or not names[group, name].gpu
    for candidate in kernel_plan.CANDIDATES:
        assert callable(getattr(kernel_candidates, candidate.make))

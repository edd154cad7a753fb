"""FlashAttention-4 gets one tensor and writes its gradient into one tensor. The kernels are simple functions here."""

import sys
import types
from typing import Any

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd

from gpt2_repro.model import attention
from gpt2_repro.model.attention import Machine, time_kernels
from gpt2_repro.model.build import build_model, compile_loss
from gpt2_repro.model.pretraining import FLASH4, _backward, flash4
from tests.model.families import configuration


def scores_of(query: Any, key: Any, scale: float) -> Any:
    scores = torch.einsum("bthd,bshd->bhts", query, key) * scale
    return scores.masked_fill(~torch.ones_like(scores).tril().bool(), -torch.inf)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Install the private functions of flash-attn-4 (4.0.0b10 to b36) that are used, and list their calls."""
    calls = []

    def forward(q, k, v, *, softmax_scale, causal, out, lse):
        assert causal and out.is_contiguous() and lse.dtype == torch.float32
        calls.append("forward")
        scores = scores_of(q.float(), k.float(), softmax_scale)
        lse.copy_(scores.logsumexp(-1))
        out.copy_(torch.einsum("bhts,bshd->bthd", scores.softmax(-1), v.float()))

    def backward(q, k, v, out, dout, lse, *, softmax_scale, causal, dq, dk, dv):
        assert causal and lse.shape == (*q.shape[:1], q.shape[2], q.shape[1])
        assert len({part.untyped_storage().data_ptr() for part in (dq, dk, dv)}) == 1
        calls.append("backward")
        q, k, v, out, dout = (part.float() for part in (q, k, v, out, dout))
        shares = (scores_of(q, k, softmax_scale) - lse.unsqueeze(-1)).exp()
        inner = torch.einsum("bthd,bshd->bhts", dout, v) - torch.einsum("bthd,bthd->bht", dout, out).unsqueeze(-1)
        change = shares * inner * softmax_scale
        dq.copy_(torch.einsum("bhts,bshd->bthd", change, k))
        dk.copy_(torch.einsum("bhts,bthd->bshd", change, q))
        dv.copy_(torch.einsum("bhts,bthd->bshd", shares, dout))

    torch._dynamo.reset()  # it compiles one function only a few times
    module = types.SimpleNamespace(_flash_attn_fwd=forward, _flash_attn_bwd=backward)
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", module)
    return calls


def config(**changes: Any) -> Any:
    return configuration(n_head=2, sequence_length=128, vocab_size=300, **changes)


def loss_and_gradients(name: str, backend: Any = None) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = build_model(config(), attention=name)
    if backend is not None:
        compile_loss(model, backend=backend)
    ids = torch.arange(2 * 128).view(2, 128) % 300
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(input_ids=ids, shift_labels=ids).loss
    loss.backward()
    return [loss.detach(), *(weight.grad for weight in model.parameters())]


def check_kernel(results: list[torch.Tensor], expected: list[torch.Tensor], calls: list[str]) -> None:
    for ours, theirs in zip(results, expected, strict=True):
        assert (ours - theirs).norm() <= 0.02 * theirs.norm()
    assert calls == ["forward"] * config().n_layer + ["backward"] * config().n_layer


def test_loss_and_gradients_are_those_of_sdpa(calls: list[str]) -> None:
    expected = loss_and_gradients("causal_sdpa")
    assert not calls
    check_kernel(loss_and_gradients(FLASH4), expected, calls)


def test_compiled_code_copies_no_gradient(calls: list[str]) -> None:
    graphs: list[Any] = []

    def keep(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    expected, results = (loss_and_gradients(name, backend) for name in ("causal_sdpa", FLASH4))
    _, backward, _, ours = graphs
    copies = [
        graph.graph.find_nodes(op="call_function", target=torch.ops.aten.cat.default) for graph in (backward, ours)
    ]
    assert [len(nodes) for nodes in copies] == [config().n_layer, 0]
    check_kernel(results, expected, calls)


def test_the_operators_are_consistent(calls: list[str]) -> None:
    joint = torch.randn(2, 16, 3, 2, 8, dtype=torch.bfloat16, requires_grad=True)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(flash4, (joint, 0.3), test_utils=checks)
    out, divisors = flash4(joint.detach(), 0.3)
    torch.library.opcheck(_backward, (out, joint.detach(), out, divisors, 0.3), test_utils=checks)


def test_other_uses_of_the_model_take_sdpa(calls: list[str]) -> None:
    ids = torch.arange(2 * 16).view(2, 16)
    outputs = []
    for name in ("causal_sdpa", FLASH4):
        torch.manual_seed(0)
        model = build_model(config(), attention=name).eval()
        with torch.no_grad():
            outputs.append(model(input_ids=ids).logits)
        model.bfloat16().generation_config.use_cache = True
        outputs.append(model.generate(ids, do_sample=False, max_new_tokens=4, pad_token_id=0))
        model.set_attn_implementation("causal_sdpa")  # as if the kernel could not be compiled
        with torch.no_grad():
            outputs.append(model(input_ids=ids).logits)
    assert not calls
    for ours, theirs in zip(outputs[:3], outputs[3:], strict=True):
        assert torch.equal(ours, theirs)


def test_a_wrong_kernel_is_not_used(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "TIMING_SECONDS", 0.01)
    machine = Machine(cuda=False, bf16=True, length=128)
    names = dict.fromkeys(("causal_sdpa", FLASH4))
    assert isinstance(time_kernels(names, machine, config(), rows=2)[FLASH4], float)
    module = sys.modules["flash_attn.cute.interface"]
    monkeypatch.setattr(
        module, "_flash_attn_bwd", lambda *_, dq, dk, dv, **__: [part.zero_() for part in (dq, dk, dv)]
    )
    assert "differs" in str(time_kernels(names, machine, config(), rows=2)[FLASH4])
    monkeypatch.setattr(module, "_flash_attn_fwd", lambda q, k, v: None)  # another version of the package
    assert "unexpected keyword" in str(time_kernels(names, machine, config(), rows=2)[FLASH4])

"""The fastest attention kernel that gives correct results on this machine is used."""

import functools
import logging
from typing import Any

import pytest
import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from gpt2_repro.errors import UserError
from gpt2_repro.model import attention, pretraining
from gpt2_repro.model.attention import HUB_KERNEL, PACKAGE, Machine, choose_attention, obstacle
from gpt2_repro.model.build import build_model, compile_loss
from tests.model.families import configuration


GPU = Machine(cuda=True, bf16=True, length=1024)


config = functools.partial(configuration, n_head=2, sequence_length=128, vocab_size=300)


def shifted(*args, **kwargs):
    out, weights = sdpa_attention_forward(*args, **kwargs)
    return out.roll(1, dims=1), weights


def broken_backward(*args, **kwargs):
    out, weights = sdpa_attention_forward(*args, **kwargs)
    out.register_hook(lambda gradient: gradient * torch.nan)
    return out, weights


def across_documents(module, query, key, value, attention_mask, **kwargs):
    return sdpa_attention_forward(module, query, key, value, None, **kwargs)


def failing(*args, **kwargs):
    raise RuntimeError("no kernel image is available\nfor execution on the device")


def untraceable(*args, **kwargs):
    torch._dynamo.graph_break()
    return sdpa_attention_forward(*args, **kwargs)


for function in (shifted, broken_backward, across_documents, failing, untraceable):
    AttentionInterface.register(function.__name__, function)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch):
    """Return a function that pretends that a GPU and attention packages exist."""

    def use(*, installed=True, kernels=False, capability=(9, 0)) -> None:
        monkeypatch.setattr(attention, "is_flash_attn_2_available", lambda: installed)
        monkeypatch.setattr(attention, "is_kernels_available", lambda: kernels)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100")

    return use


@pytest.mark.parametrize(
    ("name", "machine", "installed", "reason"),
    [
        (PACKAGE, {"cuda": False}, {}, "no NVIDIA or AMD GPU"),
        (PACKAGE, {"bf16": False}, {}, "bf16 or fp16"),
        (PACKAGE, {}, {"installed": False}, "not installed"),
        (PACKAGE, {}, {"capability": (7, 5)}, "Ampere"),
        (PACKAGE, {"one_row_compiled": True}, {}, "compile"),
        (HUB_KERNEL, {}, {}, "the package kernels"),
        ("causal_cudnn", {"length": 1000}, {}, "128"),
        ("causal_cudnn", {"document_mask": True}, {}, "masks"),
    ],
)
def test_obstacles(name: str, machine: dict, installed: dict, reason: str, card) -> None:
    card(**installed)
    with pytest.raises(UserError, match=f"{name}.*{reason}.*--attn_implementation auto"):
        choose_attention(name, GPU._replace(**machine), config(), rows=2)
    card(kernels=True)
    assert obstacle(name, GPU) is None
    assert obstacle(name, GPU._replace(bf16=False, fp16=True)) is None
    # With document lengths, transformers does not read the position ids of one row.
    assert obstacle(PACKAGE, GPU._replace(one_row_compiled=True, document_mask=True)) is None


def test_auto_uses_the_fastest_usable_kernel_or_that_of_the_run(card, monkeypatch, caplog) -> None:
    timed: dict[str, str | None] = {}

    def time_kernels(obstacles: dict[str, str | None], *args: Any, **kwargs: Any) -> dict[str, float]:
        timed.clear()
        timed.update(obstacles)
        return {name: 10.5 if name == "causal_cudnn" else 18.5 for name in obstacles}

    monkeypatch.setattr(attention, "time_kernels", time_kernels)
    for installed, unusable in (({"kernels": True}, HUB_KERNEL), ({"installed": False, "kernels": True}, PACKAGE)):
        card(**installed)
        choice = choose_attention("auto", GPU, config(), rows=64)
        assert choice.name == "causal_cudnn" and "18.50" in choice.reason
        assert [name for name, why in timed.items() if why] == [unusable]
    kept = choose_attention("auto", GPU, config(), rows=2, earlier="causal_sdpa")
    assert kept.name == "causal_sdpa"
    chosen = choose_attention("auto", GPU, config(), rows=2, earlier=PACKAGE)
    assert chosen.name == "causal_cudnn" and PACKAGE in caplog.text
    assert choose_attention("auto", GPU._replace(cuda=False), config(), rows=2).name == "causal_sdpa"


def test_document_masks_prefer_flash_attention(card, monkeypatch: pytest.MonkeyPatch) -> None:
    masked, result = GPU._replace(document_mask=True), [1.5]
    monkeypatch.setattr(
        attention, "time_kernels", lambda names, *_, **__: {name: why or result[0] for name, why in names.items()}
    )
    for installed, name in (({}, PACKAGE), ({"installed": False, "kernels": True}, HUB_KERNEL)):
        card(**installed)
        assert choose_attention("auto", masked, config(), rows=2).name == name
        assert choose_attention(name, masked, config(), rows=2).name == name
    result[0] = "it differs by 0.400"
    assert choose_attention("auto", masked, config(), rows=2).name == "causal_sdpa"
    with pytest.raises(UserError, match=r"0\.400"):
        choose_attention(HUB_KERNEL, masked, config(), rows=2)


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", "bfloat16"), ("fp16", "float16"), ("fp32", "float32")])
def test_kernels_are_timed_as_the_run_uses_them(precision, dtype, monkeypatch) -> None:
    seen: list[Any] = []

    def attend(module, query, *args, **kwargs):
        seen.append((str(query.dtype), query.shape[-1], torch.backends.cuda.cudnn_sdp_enabled()))
        return sdpa_attention_forward(module, query, *args, **kwargs)

    AttentionInterface.register("observed", attend)
    monkeypatch.setattr(attention, "TIMING_SECONDS", 0.01)
    torch.backends.cuda.enable_cudnn_sdp(True)  # as at the start of a process
    machine = Machine(cuda=False, bf16=precision == "bf16", fp16=precision == "fp16", length=128)
    attention.time_kernels({"observed": None}, machine, config("qwen3", "head_dim=32,intermediate_size=32"), rows=1)
    assert set(seen) == {(f"torch.{dtype}", 32, False)}


@pytest.mark.parametrize("document_mask", [False, True])
@pytest.mark.parametrize(
    ("model_type", "overrides"),
    [("gpt2", ""), ("llama", "num_key_value_heads=1"), ("mixtral", "num_key_value_heads=2")],
)
def test_wrong_and_failing_kernels_are_not_used(model_type, overrides, document_mask, monkeypatch) -> None:
    monkeypatch.setattr(attention, "TIMING_SECONDS", 0.01)
    wrong = {"shifted", "broken_backward", "failing", "flash"} | ({"across_documents"} if document_mask else set())
    right = {"causal_cudnn", "causal_sdpa"}
    obstacles = dict.fromkeys(wrong | right) | {"flash": "it is not installed"}
    machine = Machine(cuda=False, bf16=True, length=128, document_mask=document_mask)
    timings = attention.time_kernels(obstacles, machine, config(model_type, overrides), rows=2)
    assert {name for name, time in timings.items() if isinstance(time, float)} == right
    assert "differs from causal_sdpa by" in timings["shifted"] and "by inf" in timings["broken_backward"]
    assert "no kernel image" in timings["failing"] and attention.fastest(timings, "2 rows").name in right
    assert attention.fastest({"causal_sdpa": "it fails"}, "2 rows").name == "causal_sdpa"


def loss_of(name: str, *, compiled: bool = False, bf16: bool = False) -> torch.Tensor:
    """Return the loss and the norm of each gradient."""
    torch.manual_seed(0)
    model = build_model(config(), attention=name)
    if compiled:
        compile_loss(model, backend="aot_eager")
    ids = torch.arange(2 * 128).view(2, 128) % 300
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        loss = model(input_ids=ids, shift_labels=ids).loss
    loss.backward()
    return torch.stack([loss.detach(), *(each.grad.norm() for each in model.parameters())])


def test_cudnn_gives_the_same_loss() -> None:
    assert torch.equal(loss_of("causal_cudnn"), loss_of("causal_sdpa"))
    assert torch.allclose(loss_of("causal_cudnn", compiled=True), loss_of("causal_sdpa"), rtol=1e-4)
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_cudnn_is_tried_only_where_it_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    backends = torch.nn.attention._cur_sdpa_kernel_backends
    monkeypatch.setattr(pretraining, "sdpa_attention_forward", lambda *_, **__: seen.append(backends()))
    attend = AttentionInterface()["causal_cudnn"]
    for length, mask in ((128, None), (100, None), (128, torch.zeros(128, 128))):
        tensor = torch.zeros(1, 1, length, 8)
        attend(None, tensor, tensor, tensor, mask)
    assert [torch.nn.attention.SDPBackend.CUDNN_ATTENTION in each for each in seen] == [True, False, False]


def test_a_kernel_that_cannot_be_compiled_is_replaced(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        loss = loss_of("untraceable", compiled=True)
    assert torch.allclose(loss, loss_of("causal_sdpa"), rtol=1e-4)
    assert len([record for record in caplog.records if "untraceable cannot be compiled" in record.message]) == 1

"""The fastest attention kernel that gives correct results on this machine is used."""

import json
import logging
import math
import re
import types
from typing import Any

import pytest
import torch
from transformers import AttentionInterface, modeling_flash_attention_utils
from transformers.integrations import hub_kernels
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from gpt2_repro.errors import UserError
from gpt2_repro.model import attention, pretraining
from gpt2_repro.model.arguments import ModelArguments
from gpt2_repro.model.attention import (
    HUB_KERNEL,
    PACKAGE,
    Choice,
    Machine,
    attention_difference,
    choose_attention,
    fastest,
    obstacle,
    time_kernels,
)
from gpt2_repro.model.build import build_model
from gpt2_repro.model.compilation import compile_loss
from gpt2_repro.model.configuration import build_config


GPU = Machine(cuda=True, bf16=True, length=1024)


def config(model_type: str = "gpt2", **overrides: Any):
    args = ModelArguments(
        model_type=model_type, n_layer=2, n_head=2, n_embd=32, config_overrides=json.dumps(overrides)
    )
    return build_config(args, sequence_length=128, vocab_size=300)


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

    def use(*, installed: bool = True, kernels: bool = False, capability: tuple[int, int] = (9, 0)) -> None:
        monkeypatch.setattr(attention.importlib.util, "find_spec", lambda name: name if installed else None)
        monkeypatch.setattr(attention, "is_kernels_available", lambda: kernels)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100")

    return use


@pytest.mark.parametrize(
    ("name", "machine", "found", "reason"),
    [
        (PACKAGE, {"cuda": False}, {}, "no GPU"),
        (PACKAGE, {"bf16": False}, {}, "bf16"),
        (PACKAGE, {}, {"installed": False}, "not installed"),
        (PACKAGE, {}, {"capability": (7, 5)}, "Ampere"),
        (PACKAGE, {"one_row_compiled": True}, {}, "compile"),
        (HUB_KERNEL, {}, {}, "the package kernels"),
        ("causal_cudnn", {"length": 1000}, {}, "128"),
        ("causal_cudnn", {"document_mask": True}, {}, "masks"),
        ("causal_efficient", {"cuda": False}, {}, "no GPU"),
    ],
)
def test_obstacles(name: str, machine: dict, found: dict, reason: str, card) -> None:
    card(**found)
    assert reason in obstacle(name, GPU._replace(**machine))
    with pytest.raises(UserError, match=f"{name}.*{reason}.*--attn_implementation auto"):
        choose_attention(name, GPU._replace(**machine), config(), rows=2)
    if not machine.get("cuda", True):
        assert choose_attention("auto", GPU._replace(**machine), config(), rows=2).name == "causal_sdpa"


def test_no_obstacles(card) -> None:
    card(kernels=True)
    for name in (PACKAGE, HUB_KERNEL, "causal_cudnn", "causal_efficient", "causal_sdpa", "eager"):
        assert obstacle(name, GPU) is None
    # With document lengths, transformers does not read the position ids of one row.
    assert obstacle(PACKAGE, GPU._replace(one_row_compiled=True, document_mask=True)) is None


def test_auto_times_the_kernels_without_an_obstacle(card, monkeypatch: pytest.MonkeyPatch) -> None:
    card(kernels=True)
    asked: dict[str, str | None] = {}

    def timed(obstacles: dict[str, str | None], *args: Any, **kwargs: Any) -> dict[str, float]:
        asked.update(obstacles)
        return {name: 10.5 if name == "causal_cudnn" else 18.5 for name in obstacles}

    monkeypatch.setattr(attention, "time_kernels", timed)
    choice = choose_attention("auto", GPU, config(), rows=64)
    assert choice.name == "causal_cudnn" and "flash_attention_2 18.50" in choice.reason
    assert [name for name, why in asked.items() if why] == [HUB_KERNEL]  # the same kernel as the package
    card(installed=False, kernels=True)
    choose_attention("auto", GPU, config(), rows=64)
    assert [name for name, why in asked.items() if why] == [PACKAGE]


def test_a_resumed_run_keeps_its_kernel(card, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    card(installed=False)
    monkeypatch.setattr(attention, "time_kernels", lambda *_, **__: {"causal_sdpa": 19.0})
    kept = choose_attention("auto", GPU, config(), rows=2, earlier="causal_cudnn")
    assert kept == Choice("causal_cudnn", "as at the start of the run")
    chosen = choose_attention("auto", GPU, config(), rows=2, earlier=PACKAGE)
    assert chosen.name == "causal_sdpa" and "flash-attn is not installed" in caplog.text


def test_document_masks_prefer_flash_attention(card, monkeypatch: pytest.MonkeyPatch) -> None:
    masked = GPU._replace(document_mask=True)
    difference = 0.01
    monkeypatch.setattr(attention, "attention_difference", lambda *_, **__: difference)
    for found, name in (({}, PACKAGE), ({"installed": False, "kernels": True}, HUB_KERNEL)):
        card(**found)
        assert choose_attention("auto", masked, config(), rows=2).name == name
        assert choose_attention(name, masked, config(), rows=2).name == name
    difference = 0.4
    chosen = choose_attention("auto", masked, config(), rows=2)
    assert chosen.name == "causal_sdpa" and "0.400" in chosen.reason
    with pytest.raises(UserError, match=r"0\.400"):
        choose_attention(HUB_KERNEL, masked, config(), rows=2)


@pytest.mark.parametrize(
    ("model_type", "overrides"),
    [("gpt2", {}), ("llama", {"num_key_value_heads": 1}), ("mixtral", {"num_key_value_heads": 2})],
)
def test_wrong_and_failing_kernels_are_not_used(model_type: str, overrides: dict, monkeypatch, caplog) -> None:
    monkeypatch.setattr(attention, "TIMING_SECONDS", 0.01)
    names = ("shifted", "broken_backward", "failing", "causal_efficient", "causal_sdpa", "flash")
    obstacles = dict.fromkeys(names) | {"flash": "it is not installed"}
    timings = time_kernels(obstacles, config(model_type, **overrides), rows=2, bf16=True, device="cpu")
    timed = {name for name, time in timings.items() if isinstance(time, float) and time > 0}
    assert timed == {"causal_sdpa", "causal_efficient"}
    with caplog.at_level(logging.INFO, "gpt2_repro"):
        assert fastest(timings, "2 rows").name in timed
    table = caplog.text
    for text in ("shifted .* differs from causal_sdpa by 1", "broken_backward .* by inf", "failing .*no kernel image"):
        assert re.search(text, table)
    assert fastest({"causal_sdpa": "it fails"}, "2 rows").name == "causal_sdpa"


def test_wrong_attentions_are_found() -> None:
    """A wrong attention implementation differs clearly from a correct one."""

    def difference(name: str, *, document_mask: bool = False) -> float:
        return attention_difference(name, "causal_sdpa", device="cpu", document_mask=document_mask)

    assert difference("shifted") > 0.1 and difference("broken_backward") == math.inf
    assert difference("across_documents") == 0 and difference("across_documents", document_mask=True) > 0.1
    assert difference("eager") < 0.02 and difference("eager", document_mask=True) < 0.02


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


@pytest.mark.parametrize("name", ["causal_cudnn", "causal_efficient"])
def test_kernels_of_sdpa_give_the_same_loss(name: str) -> None:
    assert torch.equal(loss_of(name), loss_of("causal_sdpa"))
    assert torch.allclose(loss_of(name, compiled=True), loss_of("causal_sdpa"), rtol=1e-4)
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


def test_the_hub_kernel_is_used_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    # A stub, because no installable version of the package `kernels` fits transformers 5.23.
    calls = []

    def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False):
        calls.append(causal)
        heads_first = [each.transpose(1, 2) for each in (q, k, v)]
        out = torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=causal, scale=softmax_scale)
        return out.transpose(1, 2)

    stub = types.SimpleNamespace(flash_attn_func=flash_attn_func, flash_attn_varlen_func=flash_attn_func)
    monkeypatch.setattr(hub_kernels, "is_kernels_available", lambda: True)
    monkeypatch.setattr(hub_kernels, "get_attn_kernel_version", lambda name: 4)
    monkeypatch.setattr(hub_kernels, "get_kernel", lambda name, **_: stub if name == HUB_KERNEL else None)
    monkeypatch.setattr(modeling_flash_attention_utils, "_loaded_implementation", None)
    assert torch.allclose(loss_of(HUB_KERNEL, bf16=True), loss_of("causal_sdpa", bf16=True), rtol=0.02)
    assert calls == [True, True]  # one causal call per layer

"""The device determines peak FLOP/s, process count and the use of torch.compile."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gpt2_repro import hardware
from gpt2_repro.errors import UserError
from gpt2_repro.evaluation import harness
from gpt2_repro.model.attention import Machine, choose_attention
from gpt2_repro.model.configuration import build_config
from gpt2_repro.planning.sizing import follow_data
from gpt2_repro.training.settings import resolve_settings
from tests.sections import parse_for_training


@pytest.mark.parametrize(
    ("peak", "names"),
    [
        (989.4e12, ["NVIDIA H200", "NVIDIA H100 80GB HBM3"]),
        (756e12, ["NVIDIA H100 PCIe"]),
        (312e12, ["NVIDIA A100-SXM4-40GB"]),
        (149.7e12, ["NVIDIA A40"]),
        (65e12, ["Tesla T4"]),
        (112e12, ["Tesla V100-PCIE-32GB"]),
        (125e12, ["Tesla V100-SXM2-16GB", "NVIDIA A10"]),
        (70e12, ["NVIDIA A10G"]),
        (503.8e12, ["NVIDIA RTX PRO 6000 Blackwell Server Edition"]),
        (1307.4e12, ["AMD Instinct MI300X"]),
        (None, ["NVIDIA GeForce RTX 4080 SUPER", "NVIDIA GeForce RTX 3090 Ti", "Quadro RTX 6000", "NVIDIA T400"]),
        (None, ["NVIDIA RTX A4000", "NVIDIA L40", "NVIDIA GB200", "NVIDIA RTX 9999"]),
        (None, ["NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA RTX 4090 D", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"]),
    ],
)
def test_an_unknown_gpu_has_no_peak(peak: float | None, names: list[str]) -> None:
    assert {hardware.peak_flops(name) for name in names} == {peak}


def test_gpus_compile_except_where_torch_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.10 trains NaN on an A100 if it compiles."""
    a100 = SimpleNamespace(name="NVIDIA A100-SXM4-80GB", total_memory=80 * 10**9)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: a100)
    monkeypatch.setattr(hardware, "compiler_obstacle", lambda **_: None)

    def chosen(requested: bool | None, *, use_cpu: bool = False) -> bool:
        return hardware.choose_compile(requested, use_cpu=use_cpu, accept_any_hardware=False)

    monkeypatch.setattr(torch, "__version__", "2.13.0")
    assert [chosen(requested) for requested in (None, True, False)] == [True, True, False]
    assert [chosen(requested, use_cpu=True) for requested in (None, True, False)] == [False, True, False]
    monkeypatch.setattr(torch, "__version__", "2.10.1")
    assert chosen(False) is False
    for requested in (None, True):
        with pytest.raises(UserError, match="--torch_compile false"):
            chosen(requested)


@pytest.mark.parametrize("missing", ["compiler", "headers", "triton"])
def test_a_gpu_without_a_compiler_does_not_compile(
    missing: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "Python.h").touch()
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(hardware.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(hardware.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(hardware.importlib.util, "find_spec", lambda name: name)

    def chosen(requested: bool | None) -> bool:
        return hardware.choose_compile(requested, use_cpu=False, accept_any_hardware=False)

    assert chosen(None) is True
    if missing == "compiler":
        monkeypatch.setattr(hardware.shutil, "which", lambda name: None)
    elif missing == "headers":
        (tmp_path / "Python.h").unlink()
    else:
        monkeypatch.setattr(hardware.importlib.util, "find_spec", lambda name: None)
    assert chosen(None) is False and chosen(False) is False
    with pytest.raises(UserError, match="--torch_compile false"):
        chosen(True)


@pytest.fixture
def apple(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "get_name", lambda: "Apple M3 Pro")
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 24 * 10**9)


@pytest.fixture
def amd(monkeypatch: pytest.MonkeyPatch) -> None:
    card = SimpleNamespace(name="AMD Instinct MI300X", total_memory=192 * 10**9)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    for name, value in {
        "is_available": True,
        "device_count": 8,
        "get_device_properties": card,
        "get_device_capability": (9, 4),
        "is_bf16_supported": True,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value, **__: value)


GPU = ("--use_cpu", "false", "--accept_any_hardware", "false", "--precision", "auto")


@pytest.mark.parametrize("bf16", [True, False])
def test_an_apple_gpu(apple, bf16: bool, tiny_recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It trains in one process, with bf16 if macOS has it, with torch's SDPA, and uncompiled."""
    monkeypatch.setattr("transformers.utils.is_torch_bf16_available_on_device", lambda device: bf16)
    recipe = parse_for_training(tiny_recipe, *GPU)
    settings, plan = resolve_settings(follow_data(recipe))
    assert (settings.use_cpu, settings.bf16, settings.precision, settings.torch_compile) == (False, bf16, "", False)
    assert plan.num_processes == 1
    best = "bf16" if bf16 else "fp32"
    for requested, chosen in (("auto", best), ("bf16", best), ("fp16", "fp32"), ("fp32", "fp32")):
        assert hardware.choose_precision(requested, use_cpu=False, accept_any_hardware=False)[0] == chosen
    config = build_config(recipe.model, sequence_length=64, vocab_size=300)
    assert choose_attention("auto", Machine(cuda=False, bf16=bf16, length=64), config, rows=2).name == "causal_sdpa"
    assert harness.choose_device(None) == "mps"
    with pytest.raises(UserError, match="2 processes need as many GPUs"):
        hardware.check_processes(2)


def test_amd_gpus(amd, tiny_recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch for ROCm calls them cuda, and the driver of NVIDIA is not asked."""
    monkeypatch.setattr(hardware, "nvidia_driver", lambda: None)
    recipe = parse_for_training(tiny_recipe, *GPU, "--torch_compile", "false")
    settings, _ = resolve_settings(follow_data(recipe))
    assert (settings.use_cpu, settings.bf16) == (False, True)
    assert hardware.find_accelerator().peak_flops == 1307.4e12 and hardware.demo_processes() == 8
    assert harness.choose_device(None) == "cuda"

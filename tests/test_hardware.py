"""Devices as they are reported, and the words for those that cannot be used."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gpt2_repro import hardware
from gpt2_repro.errors import UserError


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989.4e12),
        ("NVIDIA H100 80GB HBM3", 989.4e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-40GB", 312e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12),
        ("NVIDIA RTX 9999", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
    ],
)
def test_an_unknown_gpu_has_no_peak(name: str, peak: float | None) -> None:
    assert hardware.peak_flops(name) == peak


def fake_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


def test_a_gpu_that_cuda_cannot_use_is_never_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpus(monkeypatch, 0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(hardware, "nvidia_driver", lambda: "470.57")
    for any_hardware in (False, True):
        with pytest.raises(UserError, match=r"driver 470.57.*--use_cpu"):
            hardware.choose_device(use_cpu=False, accept_any_hardware=any_hardware)
    assert hardware.choose_device(use_cpu=True, accept_any_hardware=False)


def test_the_cpu_is_used_where_it_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpus(monkeypatch, 0)
    monkeypatch.setattr(hardware, "nvidia_driver", lambda: None)
    with pytest.raises(UserError, match="--use_cpu"):
        hardware.choose_device(use_cpu=False, accept_any_hardware=False)
    assert hardware.choose_device(use_cpu=False, accept_any_hardware=True)
    fake_gpus(monkeypatch, 2)
    assert not hardware.choose_device(use_cpu=False, accept_any_hardware=True)


def test_more_processes_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpus(monkeypatch, 1)
    with pytest.raises(UserError, match="8 processes and 1 GPU: type --num_processes 1"):
        hardware.check_processes(8)
    hardware.check_processes(1)


@pytest.mark.parametrize(("gpus", "processes"), [(1, 1), (2, 2), (3, 2), (6, 4), (8, 8), (16, 8)])
def test_the_demo_takes_the_largest_power_of_two(monkeypatch: pytest.MonkeyPatch, gpus: int, processes: int) -> None:
    fake_gpus(monkeypatch, gpus)
    properties = SimpleNamespace(name="NVIDIA H200", total_memory=1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    assert hardware.demo_processes() == processes


@pytest.mark.parametrize(
    ("flags", "native"), [("avx2 avx512f avx512_bf16", True), ("fpu amx_bf16", True), ("avx2 avx512f", False)]
)
def test_bf16_is_native_only_with_its_instructions(monkeypatch: pytest.MonkeyPatch, flags: str, native: bool) -> None:
    monkeypatch.setattr(Path, "read_text", lambda path: f"flags : {flags}\n")
    assert hardware.cpu_multiplies_bf16() is native
    chosen, reason = hardware.choose_bf16(True, use_cpu=True, accept_any_hardware=False)
    assert chosen is native and reason.startswith("bf16" if native else "fp32")
    assert hardware.choose_bf16(False, use_cpu=True, accept_any_hardware=False)[0] is False


def test_a_gpu_without_bf16_is_refused_unless_any_hardware_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla V100")
    with pytest.raises(UserError, match="Tesla V100 cannot multiply in bf16: type --bf16 false"):
        hardware.choose_bf16(True, use_cpu=False, accept_any_hardware=False)
    assert hardware.choose_bf16(True, use_cpu=False, accept_any_hardware=True)[0] is False


def test_a_compiler_that_computes_nan_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpus(monkeypatch, 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100-SXM4-80GB")
    for version, refused in (("2.10.0+cu128", True), ("2.11.0+cu128", False), ("2.9.1", False)):
        monkeypatch.setattr(torch, "__version__", version)
        if refused:
            with pytest.raises(UserError, match="torch 2.10 compiles to NaN on A100"):
                hardware.check_compile()
        else:
            hardware.check_compile()

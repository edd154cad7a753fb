"""Devices as they are reported, and the words for those that cannot be used."""

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
        ("NVIDIA H200 NVL", 835.5e12),
        ("NVIDIA A40", 149.7e12),
        ("NVIDIA L40S", 362.05e12),
        ("NVIDIA RTX A4000", None),
        ("NVIDIA L40", None),
        ("NVIDIA GB200", None),
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


@pytest.mark.parametrize(
    ("gpus", "driver", "use_cpu", "any_hardware", "on_cpu"),
    [
        (0, "470.57", False, False, None),  # a GPU that CUDA cannot use is never passed over
        (0, "470.57", False, True, None),
        (0, "470.57", True, False, True),
        (0, None, False, False, None),
        (0, None, False, True, True),
        (2, "570.0", False, True, False),
    ],
)
def test_the_cpu_is_used_where_it_was_chosen(
    gpus: int, driver: str | None, use_cpu: bool, any_hardware: bool, on_cpu: bool | None, monkeypatch
) -> None:
    fake_gpus(monkeypatch, gpus)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(hardware, "nvidia_driver", lambda: driver)
    if on_cpu is None:
        with pytest.raises(UserError, match=f"{driver or ''}.*--use_cpu"):
            hardware.choose_device(use_cpu=use_cpu, accept_any_hardware=any_hardware)
    else:
        assert hardware.choose_device(use_cpu=use_cpu, accept_any_hardware=any_hardware) is on_cpu


@pytest.mark.parametrize(("gpus", "processes"), [(1, 1), (2, 2), (3, 2), (6, 4), (8, 8), (16, 8)])
def test_the_demo_takes_the_largest_power_of_two(monkeypatch: pytest.MonkeyPatch, gpus: int, processes: int) -> None:
    fake_gpus(monkeypatch, gpus)
    properties = SimpleNamespace(name="NVIDIA H200", total_memory=1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    assert hardware.demo_processes() == processes


@pytest.fixture
def gpu_that_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.13.0")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100-SXM4-80GB")
    monkeypatch.setattr(hardware.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(hardware.importlib.util, "find_spec", lambda name: name)


@pytest.mark.parametrize(
    ("asked", "use_cpu", "compiles"),
    [(None, False, True), (None, True, False), (True, True, True), (True, False, True), (False, False, False)],
)
@pytest.mark.usefixtures("gpu_that_compiles")
def test_gpus_compile_unless_told_not_to(asked: bool | None, use_cpu: bool, compiles: bool) -> None:
    for any_hardware in (False, True):
        chosen = hardware.choose_compile(asked, use_cpu=use_cpu, accept_any_hardware=any_hardware)
        assert chosen is compiles


@pytest.mark.parametrize(
    ("broken", "replacement", "told"),
    [
        ((torch, "__version__"), "2.10.1", "A100.* 2.9 "),
        ((hardware.shutil, "which"), lambda name: None, "gcc or clang"),
        ((hardware.importlib.util, "find_spec"), lambda name: None, "triton"),
        ((hardware.sysconfig, "get_path"), lambda name: "/nowhere", "python3-dev"),
    ],
    ids=["A100", "compiler", "triton", "headers"],
)
@pytest.mark.usefixtures("gpu_that_compiles")
def test_what_cannot_compile_is_said_before_the_run(broken, replacement, told, monkeypatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(*broken, replacement)
    for asked, any_hardware in ((None, False), (True, False), (True, True)):
        with pytest.raises(UserError, match=f"{told}.*--torch_compile false"):
            hardware.choose_compile(asked, use_cpu=False, accept_any_hardware=any_hardware)
    assert hardware.choose_compile(None, use_cpu=False, accept_any_hardware=True) is False
    assert hardware.choose_compile(False, use_cpu=False, accept_any_hardware=False) is False

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
    ("broken", "message"),
    [
        (("torch", "__version__", "2.10.1"), "torch 2.10 compiles to NaN on A100: install torch 2.9 or 2.11"),
        (("which", None, None), "needs a compiler .gcc or clang. and there is none"),
        (("find_spec", None, None), "needs triton"),
        (("headers", None, None), "needs Python's headers"),
    ],
    ids=["A100", "compiler", "triton", "headers"],
)
@pytest.mark.usefixtures("gpu_that_compiles")
def test_what_cannot_compile_is_said_before_the_run(broken, message, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    if broken[0] == "torch":
        monkeypatch.setattr(torch, "__version__", broken[2])
    elif broken[0] == "headers":
        monkeypatch.setattr(hardware.sysconfig, "get_path", lambda name: "/nowhere")
    elif broken[0] == "which":
        monkeypatch.setattr(hardware.shutil, "which", lambda name: None)
    else:
        monkeypatch.setattr(hardware.importlib.util, "find_spec", lambda name: None)
    for asked, any_hardware in ((None, False), (True, False), (True, True)):
        with pytest.raises(UserError, match=f"{message}.*--torch_compile false"):
            hardware.choose_compile(asked, use_cpu=False, accept_any_hardware=any_hardware)
    assert hardware.choose_compile(None, use_cpu=False, accept_any_hardware=True) is False
    assert hardware.choose_compile(False, use_cpu=False, accept_any_hardware=False) is False

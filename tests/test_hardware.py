"""The device determines peak FLOP/s, process count and the use of torch.compile."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gpt2_repro import hardware
from gpt2_repro.errors import UserError


@pytest.mark.parametrize(
    ("peak", "names"),
    [
        (989.4e12, ["NVIDIA H200", "NVIDIA H100 80GB HBM3"]),
        (756e12, ["NVIDIA H100 PCIe"]),
        (312e12, ["NVIDIA A100-SXM4-40GB"]),
        (149.7e12, ["NVIDIA A40"]),
        (None, ["NVIDIA RTX A4000", "NVIDIA L40", "NVIDIA GB200", "NVIDIA RTX 9999"]),
        (None, ["NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA RTX 4090 D", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"]),
    ],
)
def test_an_unknown_gpu_has_no_peak(peak: float | None, names: list[str]) -> None:
    assert {hardware.peak_flops(name) for name in names} == {peak}


def fake_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


def test_the_demo_takes_the_largest_power_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(name="NVIDIA H200", total_memory=1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    for gpus, processes in ((1, 1), (2, 2), (3, 2), (6, 4), (8, 8), (16, 8)):
        fake_gpus(monkeypatch, gpus)
        assert hardware.demo_processes() == processes


@pytest.mark.parametrize("version", [1, 2])
def test_limits_of_a_container(version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(**files: str) -> None:
        names = {"limit": "memory/memory.limit_in_bytes", "used": "memory/memory.usage_in_bytes"}
        names |= {"stat": "memory/memory.stat", "quota": "cpu/cpu.cfs_quota_us", "period": "cpu/cpu.cfs_period_us"}
        if version == 2:
            names = {"limit": "memory.max", "used": "memory.current", "stat": "memory.stat", "quota": "cpu.max"}
        for name, text in files.items():
            (tmp_path / names[name]).parent.mkdir(exist_ok=True)
            (tmp_path / names[name]).write_text(f"{text}\n", encoding="utf-8")

    memory = SimpleNamespace(total=64 * 10**9, available=60 * 10**9)
    monkeypatch.setattr(hardware.psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(hardware.os, "sched_getaffinity", lambda pid: set(range(6)))
    monkeypatch.setattr(hardware, "CGROUP", tmp_path)
    sizes = lambda: (hardware.total_memory(), hardware.available_memory(), hardware.cpu_cores())  # noqa: E731
    assert sizes() == (64 * 10**9, 60 * 10**9, 6)
    total = "total_" if version == 1 else ""
    stat = f"anon {3 * 10**9}\ninactive_file 7\n{total}inactive_file {8 * 10**9}"
    write(limit="max" if version == 2 else str(2**63 - 4096), used=str(12 * 10**9), stat=stat)
    write(**{"quota": "max 100000"} if version == 2 else {"quota": "-1", "period": "100000"})
    assert sizes() == (64 * 10**9, 60 * 10**9, 6)
    # 8 of the 12 GB are files that were read once, such as a checkpoint that was resumed from.
    write(limit=str(16 * 10**9))
    write(**{"quota": "350000 100000"} if version == 2 else {"quota": "350000"})
    assert sizes() == (16 * 10**9, 12 * 10**9, 4)


@pytest.fixture
def gpu_that_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.13.0")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100-SXM4-80GB")
    monkeypatch.setattr(hardware.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(hardware.importlib.util, "find_spec", lambda name: name)


@pytest.mark.usefixtures("gpu_that_compiles")
def test_gpus_compile_unless_told_not_to() -> None:
    for asked, on_gpu, on_cpu in ((None, True, False), (True, True, True), (False, False, False)):
        for use_cpu, compiles in ((False, on_gpu), (True, on_cpu)):
            assert hardware.choose_compile(asked, use_cpu=use_cpu, accept_any_hardware=False) is compiles


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

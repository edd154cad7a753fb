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


def test_limits_of_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container has the memory and the cores of its cgroup, not of its host."""
    memory = SimpleNamespace(total=64 * 10**9, available=60 * 10**9)
    monkeypatch.setattr(hardware.psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(hardware.os, "sched_getaffinity", lambda pid: set(range(6)))
    monkeypatch.setattr(hardware, "CGROUP", tmp_path)
    # 8 of the 12 GB are files that were read once, such as a checkpoint that was resumed from.
    stat = f"anon {3 * 10**9}\ninactive_file {8 * 10**9}\n"
    files = {"memory.current": str(12 * 10**9), "memory.stat": stat}
    for limit, quota, sizes in (
        ("max", "max 100000", (64 * 10**9, 60 * 10**9, 6)),
        (str(16 * 10**9), "350000 100000", (16 * 10**9, 12 * 10**9, 4)),
    ):
        for name, text in (files | {"memory.max": limit, "cpu.max": quota}).items():
            (tmp_path / name).write_text(f"{text}\n", encoding="utf-8")
        assert (hardware.total_memory(), hardware.available_memory(), hardware.cpu_cores()) == sizes


def test_gpus_compile_except_where_torch_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.10 trains NaN on an A100 if it compiles."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100-SXM4-80GB")
    monkeypatch.setattr(hardware.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(hardware.importlib.util, "find_spec", lambda name: name)

    def chosen(asked: bool | None, *, use_cpu: bool = False) -> bool:
        return hardware.choose_compile(asked, use_cpu=use_cpu, accept_any_hardware=False)

    monkeypatch.setattr(torch, "__version__", "2.13.0")
    assert [chosen(asked) for asked in (None, True, False)] == [True, True, False]
    assert [chosen(asked, use_cpu=True) for asked in (None, True, False)] == [False, True, False]
    monkeypatch.setattr(torch, "__version__", "2.10.1")
    assert chosen(False) is False
    for asked in (None, True):
        with pytest.raises(UserError, match="--torch_compile false"):
            chosen(asked)

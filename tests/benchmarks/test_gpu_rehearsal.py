"""The GPU benchmark with fake programs: failures, limits of time and memory, and SIGKILL."""

import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.processes import ROOT


SCRIPT = str(Path(__file__).with_name("rehearse.py"))
NVIDIA_SMI = """#!/bin/bash
case "$*" in
  *memory.used*) cat "$REHEARSAL/used" ;;
  *query-gpu=memory.total*) cat "$REHEARSAL/total" ;;
  *) echo "fake GPU, 580.1, 143771" ;;
esac
"""


class Rehearsal:
    """A call of gpu.py with fake programs, in a folder."""

    def __init__(self, folder: Path, data: Path) -> None:
        self.folder = folder
        self.data = data
        self.out = folder / "out"
        self.archive = folder / "back" / "gpu.tar.gz"
        programs = folder / "bin"
        programs.mkdir()
        query = programs / "nvidia-smi"
        query.write_text(NVIDIA_SMI, encoding="utf-8")
        query.chmod(0o755)
        self.set_memory(used_mib=0, total_mib=143771)
        path = f"{programs}{os.pathsep}{os.environ['PATH']}"
        self.environment = os.environ | {"PATH": path, "REHEARSAL": str(folder), "TMPDIR": str(folder)}

    def set_memory(self, used_mib: int, total_mib: int) -> None:
        (self.folder / "used").write_text(f"{used_mib}\n", encoding="utf-8")
        (self.folder / "total").write_text(f"{total_mib}\n", encoding="utf-8")

    def start(self, *words: str, **environment: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, SCRIPT, "--out", str(self.out), "--archive", str(self.archive)]
        command += ["--data_files", str(self.data), "--processes", "1", *words]
        with (self.folder / "output").open("wb") as output:
            return subprocess.Popen(
                command, cwd=ROOT, env=self.environment | environment, stdout=output, stderr=subprocess.STDOUT
            )

    def run(self, *words: str, **environment: str) -> dict[str, dict[str, Any]]:
        process = self.start(*words, **environment)
        code = process.wait(timeout=120)
        assert code == 0, (self.folder / "output").read_text(encoding="utf-8")
        return self.results()

    def results(self) -> dict[str, dict[str, Any]]:
        lines = (self.out / "results.jsonl").read_text(encoding="utf-8").splitlines()
        return {result["name"]: result for result in map(json.loads, lines)}

    def calls(self) -> list[str]:
        return (self.folder / "calls").read_text(encoding="utf-8").splitlines()


@pytest.fixture
def rehearsal(tmp_path: Path) -> Rehearsal:
    data = tmp_path / "data"
    data.mkdir()
    (data / "manifest.json").write_text("{}", encoding="utf-8")  # the fake training does not read it
    return Rehearsal(tmp_path, data)


def test_failures_of_variants_are_results_and_the_others_run(rehearsal: Rehearsal) -> None:
    names = ["causal_sdpa", "rows_128", "flash_attention_2", "quack_mlp", "hopper", "document_mask"]
    results = rehearsal.run(
        *["--parts", "variants", "--variants", *names],
        HANGS="--document_mask",
        OUT_OF_MEMORY="--per_device_train_batch_size 128",
    )
    assert "did not finish within 3 s" in results["document_mask"]["error"]
    assert results["rows_128"]["error"].endswith("OutOfMemoryError: CUDA out of memory. Tried to allocate 6.14 GiB.")
    assert results["quack_mlp"]["error"] == "cutlass is not installed"
    assert results["flash_attention_2"]["error"] == "flash_attn is not installed"
    for name in ("as_it_is", "causal_sdpa"):
        assert results[name]["tokens_per_second"] > 0
    assert len(rehearsal.calls()) == 4


def test_kernels_are_compared_before_variants(rehearsal: Rehearsal) -> None:
    results = rehearsal.run(
        "--parts", "kernels", "variants", "--variants", "rows_128", KERNEL_HANGS="packed_attention"
    )
    assert results["attention, packed_attention"]["error"].startswith("it was killed after")
    assert results["loss, ours, torch"] == {"part": "kernels", "name": "loss, ours, torch", "ms": 4.0, "ratio": 0.2}
    names = list(results)
    assert names.index("loss, ours, torch") < names.index("as_it_is") and "rows_128" in names
    with tarfile.open(rehearsal.archive) as archive:
        assert {"kernels.jsonl", "kernels.log", "kernels.md", "kernels_worker.log"} <= set(archive.getnames())


def test_a_variant_does_not_start_without_time(rehearsal: Rehearsal) -> None:
    results = rehearsal.run("--parts", "variants", "memory", "--minutes", "1", FIRST_SECONDS="75")
    assert results["not measured"]["error"].startswith("no time is left for: as_it_is, rows_128, logs_5")
    assert results["64 rows, triton"]["error"] == "no time is left"
    assert not (rehearsal.folder / "calls").exists()


def test_no_part_starts_if_the_text_cannot_be_prepared(rehearsal: Rehearsal) -> None:
    rehearsal.data = rehearsal.folder / "missing"
    results = rehearsal.run("--parts", "variants")
    assert list(results) == ["failed"] and results["failed"]["part"] == "prepare"
    assert not (rehearsal.folder / "calls").exists()


def test_peak_memory_is_compared_with_the_estimate(rehearsal: Rehearsal) -> None:
    rehearsal.set_memory(used_mib=26_000, total_mib=40_960)
    rows = ["8", "32", "64", "128"]
    results = rehearsal.run(
        "--parts", "memory", "--memory_rows", *rows, OUT_OF_MEMORY="--per_device_train_batch_size 32"
    )
    assert "OutOfMemoryError" in results["32 rows, triton"]["error"]
    close = results["64 rows, triton"]
    assert close["nvidia_smi_gb"] == 27.3 and close["within_5_percent"] is True
    assert results["8 rows, torch"]["within_5_percent"] is False
    assert "16 rows, triton" not in results
    assert results["128 rows"]["error"].endswith("and the GPU has 42.9 GB")  # and it is not tried
    assert not any("--per_device_train_batch_size 128" in call for call in rehearsal.calls())


@pytest.mark.parametrize("seconds", [0.0, 0.3, 1.0])
def test_results_are_readable_after_sigkill(seconds: float, rehearsal: Rehearsal) -> None:
    process = rehearsal.start("--parts", "variants", "--variants", "causal_sdpa", "logs_5", "rows_128", "ddp")
    results = rehearsal.out / "results.jsonl"
    while not results.is_file() or not results.read_bytes():
        assert process.poll() is None, (rehearsal.folder / "output").read_text(encoding="utf-8")
        time.sleep(0.01)
    time.sleep(seconds)  # at different places, whatever the speed of the machine
    process.send_signal(signal.SIGKILL)
    process.wait()
    content = results.read_bytes()
    assert content.endswith(b"\n")
    on_disk = rehearsal.results()
    assert on_disk
    with tarfile.open(rehearsal.archive) as archive:
        packed = b""
        if "results.jsonl" in archive.getnames():
            member = archive.extractfile("results.jsonl")
            assert member is not None
            packed = member.read()
        assert "as_it_is.log" in archive.getnames()
    assert content.startswith(packed) and content.count(b"\n") - packed.count(b"\n") <= 1
    # The same command appends to the results.
    rehearsal.run("--parts", "variants", "--variants", "causal_sdpa")
    assert results.read_bytes().startswith(content)

"""Preflight reads the GPU links and detects all-reduces that fail or hang."""

from pathlib import Path

import pytest
import torch.distributed as dist

from gpt2_repro.errors import UserError
from gpt2_repro.preflight import links
from gpt2_repro.preflight.links import advice, check_all_reduce, parse_topology


# The machine of the reference blog, copied from its screenshot.
BLOG = """\
        GPU0  GPU1  GPU2  GPU3  CPU Affinity  NUMA Affinity  GPU NUMA ID
GPU0     X    PIX   PXB   SYS   0-23,48-71    0              N/A
GPU1    PIX    X    PXB   SYS   0-23,48-71    0              N/A
GPU2    PXB   PXB    X    SYS   0-23,48-71    0              N/A
GPU3    SYS   SYS   SYS    X    24-47,72-95   1              N/A
"""
# Output with tabs, an underlined header, rows for network cards, and a legend.
NVLINK = (
    "\t\x1b[4mGPU0\tGPU1\tNIC0\tmlx5_1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV18\tPXB\tSYS\t0-47\t0\t\tN/A\n"
    "GPU1\tNV18\t X \tSYS\tPXB\t48-95\t1\t\tN/A\n"
    "NIC0\tPXB\tSYS\t X \tSYS\t\t\t\t\n"
    "mlx5_1\tSYS\tPXB\tSYS\t X \t\t\t\t\n"
    "\nLegend:\n\n  X    = Self\n  SYS  = Connection traversing PCIe\n\nNIC Legend:\n\n  NIC0: mlx5_0\n"
)
ONE = "\tGPU0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\nGPU0\t X \t0-15\tN/A\t\tN/A\n"
# The largest group of near GPUs is GPU1 and GPU2, so the advice names it first.
LAST_TWO_TOGETHER = "GPU0 GPU1 GPU2\nGPU0 X SYS SYS\nGPU1 SYS X PIX\nGPU2 SYS PIX X\n"


def test_advice() -> None:
    for text, good, words in (
        (BLOG, False, ["GPU0 GPU1 GPU2 | GPU3", "CUDA_VISIBLE_DEVICES=0,1", "NCCL_P2P_DISABLE=1"]),
        (BLOG.replace("SYS", "NODE").replace("PXB", "PHB"), True, ["PIX and PHB and NODE"]),
        (LAST_TWO_TOGETHER, False, ["GPU1 GPU2 | GPU0"]),
        (NVLINK, True, ["2 GPUs", "NV"]),
        (ONE, True, ["one GPU"]),
    ):
        is_good, sentence = advice(parse_topology(text))
        assert is_good is good and all(word in sentence for word in words), sentence


def test_a_text_that_is_not_a_matrix_is_refused() -> None:
    for text, named in (
        ("", "GPU0"),
        ("\n".join(BLOG.splitlines()[:-1]), "GPU3"),
        (BLOG.replace("PIX   PXB   SYS   0-23,48-71    0              N/A", "PIX"), "GPU0 and GPU2"),
        (BLOG.replace("SYS", "???"), r"\?\?\?"),
    ):
        with pytest.raises(UserError, match=named):
            parse_topology(text)


# A worker in which rank 1 joins the process group and then never takes part in the all-reduce.
ABSENT = """
import os, sys, time
import torch.distributed as dist
from gpt2_repro.preflight import links
if os.environ["RANK"] == "1":
    dist.init_process_group("gloo")
    time.sleep(600)
links.measure(float(sys.argv[1]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("script", "mark", "words"), [(None, "✓", "GB/s"), (ABSENT, "✗", "within 3 s")])
def test_two_processes(script: str | None, mark: str, words: str, tmp_path: Path, monkeypatch) -> None:
    if script:
        (tmp_path / "worker.py").write_text(script, encoding="utf-8")
        monkeypatch.setattr(links, "WORKER", [str(tmp_path / "worker.py")])
    monkeypatch.setenv("PYTHONPATH", str(Path(links.__file__).parents[2]))
    found = check_all_reduce(2, seconds=3 if script else 120)
    assert found.mark == mark and words in found.words


def test_every_number_is_compared(monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1), ("MASTER_PORT", 0)):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setattr(links, "NUMBERS", 100)
    monkeypatch.setattr(dist, "all_reduce", lambda numbers: numbers[5].add_(1))
    monkeypatch.setattr(links, "_fail", print)
    links.measure(60)
    assert "wrong sums on rank 0: 1." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("code", "said", "words"),
    [
        (None, "", "150 s"),
        (3, "0.3 GB/s\nerror: wrong sums on rank 1: 7. x\n====\n", "rank 1"),
        (1, "Traceback\nRuntimeError: invalid device ordinal\n====\nRoot Cause:\n", "RuntimeError: invalid device"),
        (1, "[rank1]: torch.OutOfMemoryError: CUDA\ntraceback : To enable traceback see\n", "[rank1]: torch.OutOf"),
        (1, "step 1\nstep 2\n----\n", "step 2"),
        (1, "", "no output"),
    ],
)
@pytest.mark.parametrize("works_without_p2p", [None, False, True])
def test_what_processes_say_is_judged(
    code: int | None, said: str, words: str, works_without_p2p: bool | None, monkeypatch
) -> None:
    """A failed all-reduce is reported with its error, and with a fix if one is known.

    `works_without_p2p`: whether a second attempt without peer-to-peer transfers succeeds, or None without a GPU.
    """

    def run(command, seconds, **variables) -> tuple[int | None, str]:
        mended = works_without_p2p and variables == {"NCCL_P2P_DISABLE": "1"}
        return (0, "9.5 GB/s\n") if mended else (code, said)

    monkeypatch.setattr(links, "run_to_end", run)
    monkeypatch.setattr(links.shutil, "which", lambda name: works_without_p2p is not None)
    found = check_all_reduce(2, seconds=30)
    assert found.mark == "✗" and words in found.words
    assert ("NCCL_P2P_DISABLE=1" in found.words) is bool(works_without_p2p)

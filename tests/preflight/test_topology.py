"""Links between GPUs, from what nvidia-smi prints."""

import pytest

from gpt2_repro.errors import UserError
from gpt2_repro.preflight.topology import advice, parse_topology


# The reference blog's machine, as its screenshot has it.
BLOG = """\
        GPU0  GPU1  GPU2  GPU3  CPU Affinity  NUMA Affinity  GPU NUMA ID
GPU0     X    PIX   PXB   SYS   0-23,48-71    0              N/A
GPU1    PIX    X    PXB   SYS   0-23,48-71    0              N/A
GPU2    PXB   PXB    X    SYS   0-23,48-71    0              N/A
GPU3    SYS   SYS   SYS    X    24-47,72-95   1              N/A
"""
# Tabs, an underlined header, network cards with rows of their own, and the legend.
NVLINK = (
    "\t\x1b[4mGPU0\tGPU1\tNIC0\tmlx5_1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV18\tPXB\tSYS\t0-47\t0\t\tN/A\n"
    "GPU1\tNV18\t X \tSYS\tPXB\t48-95\t1\t\tN/A\n"
    "NIC0\tPXB\tSYS\t X \tSYS\t\t\t\t\n"
    "mlx5_1\tSYS\tPXB\tSYS\t X \t\t\t\t\n"
    "\nLegend:\n\n  X    = Self\n  SYS  = Connection traversing PCIe\n\nNIC Legend:\n\n  NIC0: mlx5_0\n"
)
ONE = "\tGPU0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\nGPU0\t X \t0-15\tN/A\t\tN/A\n"
# The largest group comes first.
LAST_TWO_TOGETHER = "GPU0 GPU1 GPU2\nGPU0 X SYS SYS\nGPU1 SYS X PIX\nGPU2 SYS PIX X\n"


def test_advice() -> None:
    for text, good, words in (
        (BLOG, False, ["GPU0 GPU1 GPU2 | GPU3", "CUDA_VISIBLE_DEVICES=0,1", "NCCL_P2P_DISABLE=1"]),
        (BLOG.replace("SYS", "NODE").replace("PXB", "PHB"), True, ["PIX and PHB and NODE"]),
        (LAST_TWO_TOGETHER, False, ["GPU1 GPU2 | GPU0"]),
        (NVLINK, True, ["2 GPUs by NV"]),
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

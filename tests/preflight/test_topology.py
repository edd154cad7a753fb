"""How GPUs hang together, from what nvidia-smi prints."""

import pytest

from gpt2_repro.errors import UserError
from gpt2_repro.preflight.topology import advice, islands, parse_topology


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


def test_the_blog_s_machine() -> None:
    found = parse_topology(BLOG)
    assert found["GPU0", "GPU1"] == "PIX" and found["GPU3", "GPU0"] == "SYS"
    assert islands(found) == [["GPU0", "GPU1", "GPU2"], ["GPU3"]]
    good, sentence = advice(found)
    assert not good and "GPU0 GPU1 GPU2 | GPU3" in sentence and "NCCL_P2P_DISABLE=1" in sentence
    assert "CUDA_VISIBLE_DEVICES=0,1 and --num_processes 2" in sentence


def test_colours_network_cards_and_the_legend_are_skipped() -> None:
    found = parse_topology(NVLINK)
    assert {pair: link for pair, link in found.items() if link != "X"} == {
        ("GPU0", "GPU1"): "NV",
        ("GPU1", "GPU0"): "NV",
    }
    assert advice(found)[0]


def test_one_gpu_and_gpus_by_pcie() -> None:
    assert advice(parse_topology(ONE))[0]
    near = BLOG.replace("SYS", "NODE").replace("PXB", "PHB")
    sound, sentence = advice(parse_topology(near))
    assert sound and "PIX and PHB and NODE" in sentence


def test_the_largest_group_comes_first() -> None:
    rows = BLOG.splitlines()
    turned = "\n".join([rows[0], *(row.replace("PIX", "PXB").replace("PXB", "SYS") for row in rows[1:])])
    lone = turned.replace("GPU2    SYS   SYS    X    SYS", "GPU2    SYS   SYS    X    PIX")
    lone = lone.replace("GPU3     SYS   SYS   SYS", "GPU3     SYS   SYS   PIX").replace(
        "GPU3    SYS   SYS   SYS", "GPU3    SYS   SYS   PIX"
    )
    assert islands(parse_topology(lone)) == [["GPU2", "GPU3"], ["GPU0"], ["GPU1"]]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "GPU0"),
        ("GPU0: NVIDIA H100\n", "GPU0"),
        ("\n".join(BLOG.splitlines()[:-1]), "GPU3"),
        (BLOG.replace("PIX   PXB   SYS   0-23,48-71    0              N/A", "PIX"), "GPU0 and GPU2"),
        (BLOG.replace("SYS", "???"), r"\?\?\?"),
    ],
)
def test_a_text_that_is_not_a_matrix_is_refused(text: str, named: str) -> None:
    with pytest.raises(UserError, match=named):
        parse_topology(text)

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
    assert found.gpus == ["GPU0", "GPU1", "GPU2", "GPU3"]
    assert found.links["GPU0", "GPU1"] == "PIX" and found.links["GPU3", "GPU0"] == "SYS"
    assert islands(found) == [["GPU0", "GPU1", "GPU2"], ["GPU3"]]
    sound, sentence = advice(found)
    assert not sound and "GPU0 GPU1 GPU2 | GPU3" in sentence and "NCCL_P2P_DISABLE=1" in sentence
    assert "CUDA_VISIBLE_DEVICES=0,1 and --num_processes 2" in sentence


def test_colours_network_cards_and_the_legend_are_passed_over() -> None:
    found = parse_topology(NVLINK)
    assert found.gpus == ["GPU0", "GPU1"] and found.links == {("GPU0", "GPU1"): "NV18", ("GPU1", "GPU0"): "NV18"}
    assert advice(found) == (True, "2 GPUs, all by NVLink: set no NCCL variable")


def test_one_gpu_and_gpus_by_pcie() -> None:
    assert advice(parse_topology(ONE)) == (True, "one GPU: nothing to connect")
    near = BLOG.replace("SYS", "NODE").replace("PXB", "PHB")
    sound, sentence = advice(parse_topology(near))
    assert sound and "by PIX and PHB and NODE" in sentence and "less MFU" in sentence


def test_the_largest_group_comes_first() -> None:
    rows = BLOG.splitlines()
    turned = "\n".join([rows[0], *(row.replace("PIX", "PXB").replace("PXB", "SYS") for row in rows[1:])])
    lone = turned.replace("GPU2    SYS   SYS    X    SYS", "GPU2    SYS   SYS    X    PIX")
    lone = lone.replace("GPU3     SYS   SYS   SYS", "GPU3     SYS   SYS   PIX").replace(
        "GPU3    SYS   SYS   SYS", "GPU3    SYS   SYS   PIX"
    )
    assert islands(parse_topology(lone)) == [["GPU2", "GPU3"], ["GPU0"], ["GPU1"]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no output of `nvidia-smi topo -m`"),
        ("GPU0: NVIDIA H100\n", "no output of"),
        ("\n".join(BLOG.splitlines()[:-1]), "no line of GPU3"),
        (BLOG.replace("PIX   PXB   SYS   0-23,48-71    0              N/A", "PIX"), "has 2 links and the matrix 4"),
        (BLOG.replace("SYS", "???"), "have the link '???'"),
    ],
)
def test_what_is_no_matrix_is_told(text: str, message: str) -> None:
    with pytest.raises(UserError) as told:
        parse_topology(text)
    assert message in str(told.value)

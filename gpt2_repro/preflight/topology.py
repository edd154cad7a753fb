"""Read the links between GPUs from `nvidia-smi topo -m`, and advise on NCCL settings."""

import itertools
import re

from gpt2_repro.errors import UserError


# From the nearest to the farthest, as in nvidia-smi's legend. NV# is NVLink with # links; SYS crosses between processors.
DISTANCES = ("NV", "PIX", "PXB", "PHB", "NODE", "SYS")
Links = dict[tuple[str, str], str]  # the distance of every pair of GPUs, in both orders


def parse_topology(text: str) -> Links:
    """Parse the output of `nvidia-smi topo -m`; colours, network cards and the legend are skipped.

    One GPU has a link to itself only. Raises UserError if the text is something else.
    """
    lines = [line for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines() if line.strip()]
    header = next((line for line in lines if re.match(r"\s*GPU0(\s|$)", line)), "X")
    if "X" in header.split():
        raise UserError("this is not the output of `nvidia-smi topo -m`: no line of columns begins with GPU0")
    columns = re.findall(r"\b(?:GPU|NIC)\d+\b|\bmlx\d+_\w+\b", header.partition("CPU Affinity")[0])
    gpus = [name for name in columns if name.startswith("GPU")]
    rows = {line.split()[0]: line.split()[1:] for line in lines[lines.index(header) + 1 :]}
    links: Links = {}
    for one, other in itertools.product(gpus, gpus):
        cells = dict(zip(columns, rows.get(one, []), strict=False))
        distance = re.sub(r"\d+$", "", cells.get(other, "missing"))
        if distance not in (*DISTANCES, "X"):
            raise UserError(f"the link of {one} and {other} is {distance}, not {', '.join(DISTANCES)}: pass all lines")
        links[one, other] = distance
    return links


def advice(links: Links) -> tuple[bool, str]:
    """Return whether the links are good, and what they mean for NCCL."""
    found = [name for name in DISTANCES if name in links.values()]
    if not found:
        return True, "one GPU: nothing to connect"
    gpus = dict.fromkeys(one for one, _ in links)
    all_of_them = f"{len(gpus)} GPUs by {' and '.join(found)}"
    if "SYS" not in found:
        slower = "" if found == ["NV"] else "; expect less MFU than with NVLink"
        return True, f"{all_of_them}: set no NCCL variable{slower}"
    # Groups of GPUs that reach each other without the link between processors, the largest first.
    near = dict.fromkeys(tuple(other for other in gpus if links[gpu, other] != "SYS") for gpu in gpus)
    groups = sorted(near, key=len, reverse=True)
    parts = " | ".join(" ".join(group) for group in groups)
    # The largest power of two divides the tokens of a step.
    usable = 1 << (len(groups[0]).bit_length() - 1)
    numbers = ",".join(name.removeprefix("GPU") for name in groups[0][:usable])
    together = f"; close together: CUDA_VISIBLE_DEVICES={numbers} and --num_processes {usable}" if usable > 1 else ""
    return False, (
        f"{all_of_them} in groups {parts}; SYS crosses between processors: set no NCCL variable first; if a run or "
        f"--dist hangs, set NCCL_P2P_DISABLE=1{together}"
    )

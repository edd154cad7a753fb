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
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in text.splitlines()]
    header = next((line for line in lines if re.match(r"\s*GPU0(\s|$)", line) and "X" not in line.split()), None)
    if header is None:
        raise UserError("this is not the output of `nvidia-smi topo -m`: no line of columns begins with GPU0")
    columns = re.findall(r"\b(?:GPU|NIC)\d+\b|\bmlx\d+_\w+\b", header.partition("CPU Affinity")[0])
    gpus = [name for name in columns if name.startswith("GPU")]
    rows = {line.split()[0]: line.split()[1:] for line in lines[lines.index(header) + 1 :] if line.strip()}
    links: Links = {}
    for one, other in itertools.product(gpus, gpus):
        cells = dict(zip(columns, rows.get(one, []), strict=False))
        distance = re.sub(r"\d+$", "", cells.get(other, "missing"))
        if distance not in (*DISTANCES, "X"):
            raise UserError(f"the link of {one} and {other} is {distance}, not {', '.join(DISTANCES)}: pass all lines")
        links[one, other] = distance
    return links


def islands(links: Links) -> list[list[str]]:
    """Return groups of GPUs that reach each other without the link between processors, the largest first."""
    groups: list[list[str]] = []
    for gpu in dict.fromkeys(one for one, _ in links):
        home = next((group for group in groups if all(links[gpu, member] != "SYS" for member in group)), None)
        if home is None:
            groups.append([gpu])
        else:
            home.append(gpu)
    return sorted(groups, key=len, reverse=True)


def advice(links: Links) -> tuple[bool, str]:
    """Return whether the links are good, and what they mean for NCCL."""
    found = [name for name in DISTANCES if name in links.values()]
    if not found:
        return True, "one GPU: nothing to connect"
    number = f"{len({one for one, _ in links})} GPUs"
    if found == ["NV"]:
        return True, f"{number}, all by NVLink: set no NCCL variable"
    if "SYS" not in found:
        return True, f"{number} by {' and '.join(found)}: set no NCCL variable; expect less MFU than with NVLink"
    groups = islands(links)
    parts = " | ".join(" ".join(group) for group in groups)
    # The largest power of two divides the tokens of a step.
    usable = 1 << (len(groups[0]).bit_length() - 1)
    numbers = ",".join(name.removeprefix("GPU") for name in groups[0][:usable])
    return False, (
        f"{number} in groups {parts}, connected through the link between processors (SYS): set no NCCL variable first; "
        "if a run or --dist hangs, set NCCL_P2P_DISABLE=1"
        + (f"; close together: CUDA_VISIBLE_DEVICES={numbers} and --num_processes {usable}" if usable > 1 else "")
    )

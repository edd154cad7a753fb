"""How the GPUs of a machine hang together, from `nvidia-smi topo -m`, and what that means for NCCL."""

import dataclasses
import itertools
import re

from gpt2_repro.errors import UserError


# From the nearest to the farthest, as nvidia-smi's legend has them; NV# is NVLink, of # links.
DISTANCES = ("NV", "PIX", "PXB", "PHB", "NODE", "SYS")
NEAR = ("NV", "PIX", "PXB", "PHB", "NODE")  # inside one NUMA node, without the link between processors


@dataclasses.dataclass(frozen=True)
class Topology:
    """The links of every pair of GPUs."""

    gpus: list[str]
    links: dict[tuple[str, str], str]

    def distance(self, one: str, other: str) -> str:
        """The class of a link, one of DISTANCES."""
        return re.sub(r"\d+$", "", self.links[one, other])

    def near(self, one: str, other: str) -> bool:
        return self.distance(one, other) in NEAR


def parse_topology(text: str) -> Topology:
    """Read what `nvidia-smi topo -m` prints, colours, network cards and a legend included.

    Raises UserError for a text that is none.
    """
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in text.splitlines()]
    header = next((line for line in lines if re.match(r"\s*GPU0(\s|$)", line) and "X" not in line.split()), None)
    if header is None:
        raise UserError("this is no output of `nvidia-smi topo -m`: it has no line of columns that begins with GPU0")
    columns = re.findall(r"\b(?:GPU|NIC)\d+\b|\bmlx\d+_\w+\b", header.partition("CPU Affinity")[0])
    gpus = [name for name in columns if name.startswith("GPU")]
    links: dict[tuple[str, str], str] = {}
    read: set[str] = set()
    for line in lines[lines.index(header) + 1 :]:
        name, *cells = line.split() or [""]
        if name not in gpus:
            continue
        if len(cells) < len(columns):
            raise UserError(
                f"the line of {name} has {len(cells)} links and the matrix {len(columns)} columns: paste all of it"
            )
        for other, link in zip(columns, cells, strict=False):
            if other in gpus and other != name:
                if re.sub(r"\d+$", "", link) not in DISTANCES:
                    raise UserError(
                        f"{name} and {other} have the link {link!r}: nvidia-smi knows {', '.join(DISTANCES)}"
                    )
                links[name, other] = link
        read.add(name)
    if missing := [name for name in gpus if name not in read]:
        raise UserError(f"the matrix has no line of {', '.join(missing)}: paste all of it")
    return Topology(gpus, links)


def islands(topology: Topology) -> list[list[str]]:
    """GPUs that reach each other without the link between processors, the largest group first."""
    groups: list[list[str]] = []
    for gpu in topology.gpus:
        home = next((group for group in groups if all(topology.near(gpu, member) for member in group)), None)
        if home is None:
            groups.append([gpu])
        else:
            home.append(gpu)
    return sorted(groups, key=len, reverse=True)


def advice(topology: Topology) -> tuple[bool, str]:
    """Whether nothing has to be done, and in a sentence what the links mean for NCCL."""
    if len(topology.gpus) == 1:
        return True, "one GPU: nothing to connect"
    classes = {topology.distance(one, other) for one, other in itertools.combinations(topology.gpus, 2)}
    number = f"{len(topology.gpus)} GPUs"
    if classes == {"NV"}:
        return True, f"{number}, all by NVLink: set no NCCL variable"
    if classes <= set(NEAR):
        return (
            True,
            f"{number} by {_named(classes)}, none through the link between processors: set no NCCL variable; expect less MFU than by NVLink",
        )
    groups = islands(topology)
    parts = " | ".join(" ".join(group) for group in groups)
    # Of a group a power of two, which divides the tokens of a step.
    usable = 1 << (len(groups[0]).bit_length() - 1)
    numbers = ",".join(name.removeprefix("GPU") for name in groups[0][:usable])
    near_ones = f"; near each other: CUDA_VISIBLE_DEVICES={numbers} and --num_processes {usable}"
    return False, (
        f"{number} in groups {parts}, between which everything goes through the link between processors "
        f"({_named(classes - set(NEAR))}): set no NCCL variable beforehand; where a run hangs, or --dist does, NCCL_P2P_DISABLE=1"
        + (near_ones if usable > 1 else "")
    )


def _named(classes: set[str]) -> str:
    return " and ".join(name for name in DISTANCES if name in classes)

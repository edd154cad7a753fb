"""Check the links between GPUs: read `nvidia-smi topo -m`, and time and check a sum over all processes.

torchrun --nproc_per_node 8 -m gpt2_repro.preflight.links 30      the sum that `preflight --dist` starts
"""

import itertools
import os
import re
import shutil
import sys
import threading
import time

from gpt2_repro.errors import UserError
from gpt2_repro.preflight.environment import Finding
from gpt2_repro.preflight.processes import last_words, run_to_end


# From the nearest to the farthest, as in nvidia-smi's legend. NV# is NVLink with # links; SYS crosses between processors.
DISTANCES = ("NV", "PIX", "PXB", "PHB", "NODE", "SYS")
Links = dict[tuple[str, str], str]  # the distance of every pair of GPUs, in both orders
WORKER = ["-m", "gpt2_repro.preflight.links"]
NUMBERS = 16 * 2**20  # fp32: 64 MiB
ROUNDS = 20
STARTING = 120.0  # seconds for all processes to import torch: eight on 2 cores took 20
# Wrong sums come from peer to peer through an IOMMU (pytorch#84803), hangs from it too (NVIDIA/nccl#631, #2079).
WITHOUT_P2P = {"NCCL_P2P_DISABLE": "1"}


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
    return False, f"{all_of_them} in groups {parts}; if a run or --dist hangs, set NCCL_P2P_DISABLE=1{together}"


def measure(seconds: float) -> None:
    """Sum numbers that depend on rank and place, compare every result, and let rank 0 print the speed.

    Ends the process with an error line if a sum is wrong, or `seconds` after all processes have met.
    """
    import torch
    import torch.distributed as dist

    cuda = torch.cuda.is_available()
    rank = int(os.environ["RANK"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    late = f"no sum within {seconds:.0f} s: the processes do not reach each other"
    timer = threading.Timer(seconds, _fail, [late])
    timer.daemon = True
    timer.start()
    processes = dist.get_world_size()
    places = torch.arange(NUMBERS, device=device, dtype=torch.float32) % 1024
    # Small whole numbers: their sums are exact in fp32 in any order.
    expected = places * processes + processes * (processes - 1) / 2
    fastest = float("inf")
    for _ in range(ROUNDS):
        numbers = places + rank
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(numbers)
        if cuda:
            torch.cuda.synchronize()
        fastest = min(fastest, time.perf_counter() - began)
        if wrong := int((numbers != expected).sum()):
            _fail(f"rank {rank} has {wrong:,} wrong numbers: the links corrupt data")
    dist.barrier()
    if rank == 0:
        moved = 2 * (processes - 1) / processes * NUMBERS * 4  # of each process, in a ring
        sys.stdout.write(f"{moved / fastest / 1e9:.1f} GB/s\n")
    timer.cancel()
    dist.destroy_process_group()


def _fail(reason: str) -> None:
    """End this process at once; a hanging collective would block a normal exit."""
    os.write(1, f"error: {reason}\n".encode())  # one write, because all processes share the output
    os._exit(3)


def check_all_reduce(processes: int, *, seconds: float) -> Finding:
    """Sum over so many processes. If GPUs fail, try again without peer to peer."""
    about = f"sum over {processes} processes"
    speed, trouble = _attempt(processes, seconds)
    if speed:
        return Finding("✓", about, f"{speed}, every number right")
    fix = "see `nvidia-smi topo -m` and `dmesg`, or rent another machine"
    if shutil.which("nvidia-smi") and _attempt(processes, seconds, **WITHOUT_P2P)[0]:
        fix = "it works with NCCL_P2P_DISABLE=1, more slowly: export that before the run"
    return Finding("✗", about, f"{trouble}; {fix}")


def _attempt(processes: int, seconds: float, **variables: str) -> tuple[str, str]:
    """Return the speed, or '' and what went wrong."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    limit = STARTING + seconds
    code, said = run_to_end([*launcher, *WORKER, str(seconds)], seconds=limit, **variables)
    if code is None:
        return "", f"not done in {limit:.0f} s"
    speed = re.search(r"^[\d.]+ GB/s$", said, re.MULTILINE)
    return (speed[0], "") if code == 0 and speed else ("", last_words(said))


if __name__ == "__main__":
    measure(float(sys.argv[1]))

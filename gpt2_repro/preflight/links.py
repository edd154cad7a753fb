"""Check the links between GPUs.

This command measures the speed of all-reduces on 8 GPUs and checks their sums, with a time limit of 30 seconds:

    torchrun --nproc_per_node 8 -m gpt2_repro.preflight.links 30
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


# From nearest to farthest, as in the legend of nvidia-smi. NV#: NVLink with # links. SYS: crosses between CPU sockets.
DISTANCES = ("NV", "PIX", "PXB", "PHB", "NODE", "SYS")
Links = dict[tuple[str, str], str]  # distance of each pair of GPUs, in both orders; X: the same GPU
WORKER = ["-m", "gpt2_repro.preflight.links"]
NUMBERS = 16 * 2**20  # fp32 numbers per process: 64 MiB
ROUNDS = 20
STARTING = 120.0  # seconds for all processes to import torch; 8 processes on 2 cores took 20 s
# Peer-to-peer transfers through an IOMMU can cause wrong sums (pytorch#84803) and hangs (NVIDIA/nccl#631, #2079).
WITHOUT_P2P = {"NCCL_P2P_DISABLE": "1"}


def parse_topology(text: str) -> Links:
    """Return the kinds of links between GPUs in the output of `nvidia-smi topo -m`.

    Raises UserError if `text` is not complete output of this command.
    """
    lines = [line for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines() if line.strip()]
    header = next((line for line in lines if re.match(r"\s*GPU0(\s|$)", line)), "X")
    if "X" in header.split():
        raise UserError("No header line with GPU0 found. Pass the complete output of `nvidia-smi topo -m`.")
    columns = re.findall(r"\b(?:GPU|NIC)\d+\b|\bmlx\d+_\w+\b", header.partition("CPU Affinity")[0])
    gpus = [name for name in columns if name.startswith("GPU")]
    rows = {line.split()[0]: line.split()[1:] for line in lines[lines.index(header) + 1 :]}
    links: Links = {}
    for one, other in itertools.product(gpus, gpus):
        cells = dict(zip(columns, rows.get(one, []), strict=False))
        distance = re.sub(r"\d+$", "", cells.get(other, "missing"))
        if distance not in (*DISTANCES, "X"):
            raise UserError(
                f"The link between {one} and {other} is {distance}, which is not one of {', '.join(DISTANCES)}. Pass the "
                "complete output of `nvidia-smi topo -m`."
            )
        links[one, other] = distance
    return links


def advice(links: Links) -> tuple[bool, str]:
    """Return whether the GPU links are good, and a sentence with advice for NCCL."""
    found = [name for name in DISTANCES if name in links.values()]
    if not found:
        return True, "this machine has only one GPU"
    gpus = dict.fromkeys(one for one, _ in links)
    all_of_them = f"{len(gpus)} GPUs connected by {' and '.join(found)}"
    if "SYS" not in found:
        slower = "" if found == ["NV"] else "; expect a lower MFU than with NVLink"
        return True, f"{all_of_them}: no NCCL variables are needed{slower}"
    # Groups of GPUs that are connected without the link between CPU sockets, largest group first.
    near = dict.fromkeys(tuple(other for other in gpus if links[gpu, other] != "SYS") for gpu in gpus)
    groups = sorted(near, key=len, reverse=True)
    parts = " | ".join(" ".join(group) for group in groups)
    # Use a power of two, because it divides the tokens per step.
    usable = 1 << (len(groups[0]).bit_length() - 1)
    numbers = ",".join(name.removeprefix("GPU") for name in groups[0][:usable])
    together = f"; for the nearest GPUs: CUDA_VISIBLE_DEVICES={numbers} --num_processes {usable}" if usable > 1 else ""
    return False, f"{all_of_them}, in groups {parts}; if a run or --dist hangs, set NCCL_P2P_DISABLE=1{together}"


def measure(seconds: float) -> None:
    """Measure the speed of all-reduces in this process, and check their sums.

    Rank 0 prints the speed in GB/s. The process exits with code 3 if a sum is wrong, or if the all-reduces take longer
    than `seconds`.
    """
    import torch
    import torch.distributed as dist

    cuda = torch.cuda.is_available()
    rank = int(os.environ["RANK"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    late = f"no sum within {seconds:.0f} s: the processes cannot communicate"
    timer = threading.Timer(seconds, _fail, [late])
    timer.daemon = True
    timer.start()
    processes = dist.get_world_size()
    places = torch.arange(NUMBERS, device=device, dtype=torch.float32) % 1024
    # Sums of small integers are exact in fp32, in any order.
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
            _fail(f"wrong sums on rank {rank}: {wrong:,}. The GPU links corrupt data")
    dist.barrier()
    if rank == 0:
        moved = 2 * (processes - 1) / processes * NUMBERS * 4  # bytes per process in a ring all-reduce
        sys.stdout.write(f"{moved / fastest / 1e9:.1f} GB/s\n")
    timer.cancel()
    dist.destroy_process_group()


def _fail(reason: str) -> None:
    """Print an error line and exit immediately with code 3."""
    os.write(1, f"error: {reason}\n".encode())  # a single write: all processes share the output
    os._exit(3)  # a normal exit would wait for an all-reduce that hangs


def check_all_reduce(processes: int, *, seconds: float) -> Finding:
    """Start processes that measure the speed of all-reduces and check their sums.

    The check fails if the all-reduces take longer than `seconds`.
    """
    about = f"all-reduce over {processes} processes"
    speed, trouble = _attempt(processes, seconds)
    if speed:
        return Finding("✓", about, f"{speed}, and every all-reduce gave the correct result")
    fix = "look at `nvidia-smi topo -m` and `dmesg`, or rent another machine"
    if shutil.which("nvidia-smi") and _attempt(processes, seconds, **WITHOUT_P2P)[0]:
        fix = "set NCCL_P2P_DISABLE=1 for the run. All-reduces are then correct, but slower"
    return Finding("✗", about, f"{trouble}; {fix}")


def _attempt(processes: int, seconds: float, **variables: str) -> tuple[str, str]:
    """Run the all-reduce check once, with `variables` added to the environment.

    Returns (speed, "") if the check passed, otherwise ("", error message).
    """
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    limit = STARTING + seconds
    code, said = run_to_end([*launcher, *WORKER, str(seconds)], seconds=limit, **variables)
    if code is None:
        return "", f"not finished after {limit:.0f} s"
    speed = re.search(r"^[\d.]+ GB/s$", said, re.MULTILINE)
    return (speed[0], "") if code == 0 and speed else ("", last_words(said))


if __name__ == "__main__":
    measure(float(sys.argv[1]))

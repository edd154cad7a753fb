"""Measure the speed of all-reduces between GPUs, and check their sums.

This command tests 8 GPUs, with a time limit of 30 seconds:

    torchrun --nproc_per_node 8 -m gpt2_repro.preflight.links 30
"""

import datetime
import os
import re
import shutil
import sys
import threading
import time

from gpt2_repro.preflight.environment import error_in, run_command
from gpt2_repro.text import Finding


NUMBERS = 16 * 2**20  # fp32 numbers per process: 64 MiB
ROUNDS = 20
STARTING = 120.0  # seconds for all processes to import torch; 8 processes on 2 cores took 20 s


def measure(seconds: float) -> None:
    """Print the speed of all-reduces in GB/s.

    The process exits with code 3 if a sum is wrong, or if the all-reduces take longer than `seconds`.
    """
    import torch
    import torch.distributed as dist

    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", timeout=datetime.timedelta(seconds=STARTING))
    timer = threading.Timer(seconds, _fail, [f"no sum within {seconds:.0f} s: the processes cannot communicate"])
    timer.daemon = True
    timer.start()
    rank = dist.get_rank()
    processes = dist.get_world_size()
    positions = torch.arange(NUMBERS, device=device, dtype=torch.float32) % 1024
    # Sums of small integers are exact in fp32, in any order.
    expected = positions * processes + processes * (processes - 1) / 2
    fastest = float("inf")
    for _ in range(ROUNDS):
        numbers = positions + rank
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(numbers)
        if cuda:
            torch.cuda.synchronize()
        fastest = min(fastest, time.perf_counter() - began)
        wrong = int((numbers != expected).sum())
        if wrong:
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


def check_all_reduce(processes: int, *, seconds: float = 30.0) -> Finding:
    """Measure and check all-reduces over `processes` new processes."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    command = [*launcher, "-m", "gpt2_repro.preflight.links", str(seconds)]
    about = f"all-reduce over {processes} processes"
    limit = STARTING + seconds
    code, output = run_command(command, limit)
    speed = re.search(r"^[\d.]+ GB/s$", output, re.MULTILINE)
    if code == 0 and speed:
        return Finding("✓", about, f"{speed[0]}, and every all-reduce gave the correct result")
    fix = "look at `nvidia-smi topo -m` and `dmesg`, or rent another machine"
    # Peer-to-peer transfers through an IOMMU can cause wrong sums (pytorch#84803) and hangs (NVIDIA/nccl#631, #2079).
    if shutil.which("nvidia-smi") and run_command(command, limit, NCCL_P2P_DISABLE="1")[0] == 0:
        fix = "set NCCL_P2P_DISABLE=1 for the run. All-reduces are then correct, but slower"
    return Finding("✗", about, f"{error_in(output)}; {fix}")


if __name__ == "__main__":
    measure(float(sys.argv[1]))

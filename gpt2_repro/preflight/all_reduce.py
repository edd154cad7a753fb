"""A sum over all processes, timed and checked: a link that hangs or lies is found in seconds, not after the data is loaded.

torchrun --nproc_per_node 8 -m gpt2_repro.preflight.all_reduce      what `preflight --dist` starts
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

import psutil

from gpt2_repro.preflight.findings import Finding


NUMBERS = 16 * 2**20  # fp32: 64 MiB
ROUNDS = 20
# Wrong sums come from peer to peer through an IOMMU (pytorch#84803), hangs from it too (NVIDIA/nccl#631, #2079).
WITHOUT_P2P = {"NCCL_P2P_DISABLE": "1"}


def measure() -> None:
    """In each process: sum what depends on rank and place, compare every number, and have rank 0 print the speed.

    Exits with 3 where a sum is wrong.
    """
    import torch
    import torch.distributed as dist

    cuda = torch.cuda.is_available()
    rank, local = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    processes = dist.get_world_size()
    places = torch.arange(NUMBERS, device=device, dtype=torch.float32) % 1024
    # Small whole numbers: their sums are exact in fp32 in any order.
    expected = places * processes + processes * (processes - 1) / 2
    seconds = []
    for _ in range(ROUNDS):
        numbers = places + rank
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(numbers)
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
        if not torch.equal(numbers, expected):
            _answer(rank=rank, wrong=int((numbers != expected).sum()))
            os._exit(3)
    dist.barrier()
    if rank == 0:
        moved = 2 * (processes - 1) / processes * NUMBERS * 4  # of each process, in a ring
        _answer(gigabytes_per_second=moved / min(seconds) / 1e9)
    dist.destroy_process_group()


def _answer(**values: float) -> None:
    """A line for the process that has started this one."""
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


def check_all_reduce(processes: int, *, seconds: float, command: Sequence[str] = ()) -> Finding:
    """Start the processes and judge what they say within so many seconds; where GPUs do not manage, also without P2P.

    `command`: what to start in place of this module.
    """
    about = f"sum over {processes} processes"
    speed, trouble = _attempt(processes, seconds, command, {})
    if speed is not None:
        return Finding("✓", about, f"{speed:.1f} GB/s, every number right")
    if shutil.which("nvidia-smi") and _attempt(processes, seconds, command, WITHOUT_P2P)[0] is not None:
        return Finding(
            "✗", about, f"{trouble}; with NCCL_P2P_DISABLE=1 it works, more slowly: export that before the run"
        )
    return Finding("✗", about, f"{trouble}: see `nvidia-smi topo -m` and `dmesg`, or rent another machine")


def _attempt(
    processes: int, seconds: float, command: Sequence[str], variables: Mapping[str, str]
) -> tuple[float | None, str]:
    """GB/s, or None and what went wrong."""
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    words += command or ["-m", "gpt2_repro.preflight.all_reduce"]
    with subprocess.Popen(
        words,
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as group:
        try:
            said, _ = group.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            # The launcher's workers have sessions of their own.
            for process in [*psutil.Process(group.pid).children(recursive=True), group]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            group.communicate()
            return None, f"nothing came back in {seconds:.0f} s: the processes do not reach each other"
    answers = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    for answer in answers:
        if "wrong" in answer:
            return None, f"rank {answer['rank']} has {answer['wrong']:,} wrong numbers: links that corrupt data"
        if "gigabytes_per_second" in answer:
            return answer["gigabytes_per_second"], ""
    return None, f"the processes ended with exit code {group.returncode} and no answer"


if __name__ == "__main__":
    measure()

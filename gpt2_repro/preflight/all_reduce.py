"""A sum over all processes, timed and checked: a link that hangs or lies is found in seconds, not after the data is loaded.

torchrun --nproc_per_node 8 -m gpt2_repro.preflight.all_reduce      what `preflight --dist` starts
"""

import json
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from gpt2_repro.preflight.findings import Finding
from gpt2_repro.preflight.processes import last_words, run_to_end


NUMBERS = 16 * 2**20  # fp32: 64 MiB
ROUNDS = 20
STARTING = 120.0  # seconds for all processes to import torch: eight on 2 cores took 20
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
    _answer(started=rank)
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
    """A line for the process that has started this one, in one write: all processes share the file."""
    os.write(sys.stdout.fileno(), f"{json.dumps(values)}\n".encode())


def check_all_reduce(processes: int, *, seconds: float, command: Sequence[str] = ()) -> Finding:
    """Start the processes and judge what they say within so many seconds of all being there.

    Where GPUs do not manage, also without P2P. `command`: what to start in place of this module.
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
    together: list[float] = []  # when all were there

    def too_long(said: str, elapsed: float) -> bool:
        if not together and sum("started" in answer for answer in _answers(said)) == processes:
            together.append(elapsed)
        return elapsed > together[0] + seconds if together else elapsed > STARTING

    code, said = run_to_end(words, too_long=too_long, environment=variables)
    answers = _answers(said)
    for answer in answers:
        if "wrong" in answer:
            return None, f"rank {answer['rank']} has {answer['wrong']:,} wrong numbers: links that corrupt data"
        if "gigabytes_per_second" in answer:
            return answer["gigabytes_per_second"], ""
    if code is not None:
        return None, f"the processes ended with exit code {code} and no sum ({last_words(said)})"
    if together:
        return None, f"nothing came back in {seconds:.0f} s: the processes do not reach each other"
    missing = processes - sum("started" in answer for answer in answers)
    return None, f"{missing} of the processes did not start in {STARTING:.0f} s"


def _answers(said: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in said.splitlines() if line.startswith('{"') and line.endswith("}")]


if __name__ == "__main__":
    measure()

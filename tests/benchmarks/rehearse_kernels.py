"""Run benchmarks/kernels.py with a fake process instead of that which measures kernels.

Environment variables, each with the name of a candidate (such as "packed_attention"):
    KERNEL_HANGS, KERNEL_CRASHES: the process hangs, or ends with SIGKILL, while it measures this candidate.
    KERNEL_WRONG: the results of this candidate are wrong.
    WORKER_FAILS: the process ends before it has tried any candidate.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any


sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks import kernel_plan, kernels
from benchmarks.gpu_results import append_line


def fake_worker(words: list[str]) -> None:
    """Write results without measuring anything. A later candidate is faster."""
    if "WORKER_FAILS" in os.environ:
        sys.exit("ModuleNotFoundError: No module named 'torch'")
    results = kernels.parse(words).results
    entries: list[dict[str, Any]] = []
    if results.is_file():
        entries = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    for candidate in kernel_plan.without_result(entries):
        entry: dict[str, Any] = {"group": candidate.group, "name": candidate.name}
        append_line(results, entry | {"started": time.time()})
        if candidate.name == os.environ.get("KERNEL_HANGS"):
            time.sleep(60)
        if candidate.name == os.environ.get("KERNEL_CRASHES"):
            os.kill(os.getpid(), signal.SIGKILL)
        ms = 20.0 - kernel_plan.CANDIDATES.index(candidate)
        entry |= {"ms": ms, "ratio": ms / 20}
        if candidate.group == kernel_plan.PRODUCTS:
            entry |= {"ms_of_half": ms, "teraflops": [600.0] * 3, "teraflops_of_half": [500.0] * 3}
        if candidate.name == os.environ.get("KERNEL_WRONG"):
            entry["wrong"] = "rms error of the output: 1"
        append_line(results, entry)


def rehearse(words: list[str]) -> None:
    """Run kernels.py with the fake process and short limits."""
    kernels.WORKER = [sys.executable, __file__, "fake-worker"]
    kernels.LIMIT_FACTOR = 0.2
    kernels.main(words)


if __name__ == "__main__":
    if sys.argv[1] == "fake-worker":
        fake_worker(sys.argv[2:])
    else:
        rehearse(sys.argv[1:])

"""Measure how long a rank takes to find its position in the data on resume.

    python benchmarks/resume_cost.py
    python benchmarks/resume_cost.py --step 9000 --processes 1

The orders in which this project reads rows are compared with the order of transformers' Trainer. The simulated data
set has as many rows as 10B tokens fill, but returns only row numbers. The time is measured from the creation of the
loader to the first batch after `--step`. Each order is measured in a fresh process. The other parts of a resume
(imports, reading the checkpoint) are not measured, because their time does not depend on the step.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from typing import Any

import numpy as np


ROWS = 9_765_625  # rows of 1,024 targets: 10B tokens
TOKENS_PER_STEP = 524_288
LENGTH = 1024
WAYS = {
    "shuffled": "this project, rows shuffled in blocks and windows",
    "by_length": "this project, rows grouped by length (256 to 1,024 targets)",
    "trainer": "Trainer's RandomSampler",
}


class Rows:
    """A data set that returns row numbers instead of rows."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, number: int) -> int:
        return number


def measure(way: str, step: int, processes: int, micro_batch: int) -> dict[str, Any]:
    """Measure the time and memory that a rank needs for its first batch after `step`.

    `way` is a key of WAYS, which lists orders of rows.
    """
    from accelerate.data_loader import prepare_data_loader, skip_first_batches
    from torch.utils.data import DataLoader, RandomSampler

    from gpt2_repro.batch_plan import BatchPlan, passes_by_length
    from gpt2_repro.data.batching import EpochSampler, LengthGroupedBatches

    passes = TOKENS_PER_STEP // LENGTH // micro_batch // processes
    rows = Rows()
    lengths = np.random.default_rng(0).integers(256, 1025, ROWS) if way == "by_length" else None
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.perf_counter()
    if lengths is not None:
        least = passes_by_length(TOKENS_PER_STEP, rows=micro_batch, longest=1024, shortest=256)
        passes = -(-least // processes)
        plan = BatchPlan(TOKENS_PER_STEP, 1024, micro_batch, processes, passes, 1, by_length=True)
        batches = LengthGroupedBatches(lengths, plan, seed=1)
        loader = DataLoader(rows, batch_sampler=batches, collate_fn=list)
        step = min(step, batches.steps_per_epoch - 1)
    else:
        rows_per_step = TOKENS_PER_STEP // LENGTH
        ours = EpochSampler(ROWS, rows_per_step=rows_per_step, seed=1, shuffle=True)
        sampler = ours if way == "shuffled" else RandomSampler(rows)
        loader = DataLoader(rows, batch_size=micro_batch, sampler=sampler, collate_fn=list)
    loader = prepare_data_loader(
        loader, num_processes=processes, process_index=0, put_on_device=False, even_batches=lengths is None
    )
    batch = next(iter(skip_first_batches(loader, step * passes)))
    seconds = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"way": way, "step": step, "seconds": seconds, "megabytes": (after - before) / 1024, "rows": len(batch)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step", type=int, nargs="+", default=[100, 9_000, 18_800], help="Steps. (100 9000 18800)")
    parser.add_argument("--processes", type=int, default=8, help="Processes that share the rows. (default: 8)")
    parser.add_argument("--micro_batch", type=int, default=64, help="Rows per micro-batch. (default: 64)")
    parser.add_argument("--way", choices=WAYS, help="Measure only this order, in this process, and print JSON.")
    args = parser.parse_args()
    if args.way:
        print(json.dumps(measure(args.way, args.step[0], args.processes, args.micro_batch)))
        return
    print(f"{ROWS:,} rows, {args.processes} processes, one of them measured\n")
    print("| order | at step | seconds | additional MB |\n| --- | --- | --- | --- |")
    for way, name in WAYS.items():
        for step in args.step:
            options = ["--way", way, "--step", step, "--processes", args.processes, "--micro_batch", args.micro_batch]
            words = [sys.executable, __file__, *map(str, options)]
            done = json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
            print(f"| {name} | {done['step']:,} | {done['seconds']:.2f} | {done['megabytes']:.0f} |", flush=True)


if __name__ == "__main__":
    main()

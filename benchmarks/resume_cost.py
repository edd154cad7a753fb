"""Measure how long a rank takes to find its position in the data on resume.

    python benchmarks/resume_cost.py
    python benchmarks/resume_cost.py --step 9000 --processes 1

The order in which this project reads rows is compared with the order of transformers' Trainer. The simulated data set
has as many rows as 10B tokens fill, but returns only row numbers. The time is measured from the creation of the loader
to the first batch after `--step`, in a fresh process. The other parts of a resume (imports, reading the checkpoint) are
not measured, because their time does not depend on the step.
"""

import argparse
import multiprocessing
import resource
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from accelerate.data_loader import prepare_data_loader, skip_first_batches
from torch.utils.data import DataLoader, RandomSampler


sys.path.insert(0, str(Path(__file__).parents[1]))
from gpt2_repro.data.batching import EpochSampler


ROWS = range(9_765_625)  # numbers of rows of 1,024 targets: 10B tokens
ROWS_PER_STEP = 512
ORDERS = ("this project, rows shuffled in blocks and windows", "Trainer's RandomSampler")


def measure(order: str, step: int, processes: int, micro_batch: int) -> tuple[float, float]:
    """Return the seconds and the MB that a rank needs for its first batch after `step`."""
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    ours = EpochSampler(len(ROWS), rows_per_step=ROWS_PER_STEP, seed=1, shuffle=True)
    sampler = ours if order == ORDERS[0] else RandomSampler(ROWS)
    loader = DataLoader(ROWS, batch_size=micro_batch, sampler=sampler, collate_fn=list)
    loader = prepare_data_loader(loader, num_processes=processes, process_index=0, put_on_device=False)
    next(iter(skip_first_batches(loader, step * ROWS_PER_STEP // micro_batch // processes)))
    seconds = time.perf_counter() - began
    return seconds, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step", type=int, nargs="+", default=[100, 9_000, 18_800], help="Steps. (100 9000 18800)")
    parser.add_argument("--processes", type=int, default=8, help="Processes that share the rows. (default: 8)")
    parser.add_argument("--micro_batch", type=int, default=64, help="Rows per micro-batch. (default: 64)")
    args = parser.parse_args()
    print(f"{len(ROWS):,} rows, {args.processes} processes, one of them measured\n")
    print("| order | at step | seconds | additional MB |\n| --- | --- | --- | --- |")
    for order in ORDERS:
        for step in args.step:
            with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
                seconds, megabytes = pool.submit(measure, order, step, args.processes, args.micro_batch).result()
            print(f"| {order} | {step:,} | {seconds:.2f} | {megabytes:.0f} |", flush=True)


if __name__ == "__main__":
    main()

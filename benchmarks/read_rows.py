"""Measure how long it takes to read rows in several orders and file formats.

    python benchmarks/read_rows.py                                   # 7 GB of random ids in the temporary folder
    python benchmarks/read_rows.py --folder /data --rows 2000000     # on the disk that a run would read from

This project's file format and order of rows are compared with other formats and orders. The script needs Linux, but
not root. --rows must be a multiple of 1,000.

Each line of the printed table is measured in fresh processes. Odd rounds measure the lines in order, even rounds in
reverse order.

Cold measurement: the files are opened and dropped from the page cache, then --batches batches are read. The default of
512 batches contains 32,768 rows, the number of rows that this project's sampler shuffles together. Reads during the
opening are not counted. In a virtual machine, the host may still cache the files.

Warm measurement: all files are read completely before the measurement, so they are in the page cache.

The script does not compute anything between batches. If data loader workers are used, the time of a batch is therefore
the time that the workers need. During training, loading a batch delays a step at least by the CPU time of the main
process. torch uses one thread, as in a worker and under torchrun.

The column KiB per row depends on the kernel's read-ahead. If nearly 100 % of the files are in the page cache after the
cold batches, the orders do not differ. In that case, pass more --rows to see a difference.
"""

import argparse
import ctypes
import itertools
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import torch
from torch.utils.data import DataLoader, RandomSampler
from transformers import default_data_collator


sys.path.insert(0, str(Path(__file__).parents[1]))
from gpt2_repro.data.batching import EpochSampler, collate_rows
from gpt2_repro.data.preparation.writing import write_rows
from gpt2_repro.data.rows import open_rows


LENGTH, ROWS, WARM_WINDOWS, WARM_BATCHES = 1024, 64, 3, 64  # targets per row, rows per batch, windows, batches
CONTENDERS = {  # key: (line of the table, files, workers)
    "blocks": ("this project's rows and order", "train/*.arrow", (0, 2)),
    "permutation": ("this project's rows, plain permutation", "train/*.arrow", (0, 2)),
    "sequential": ("this project's rows, in sequence", "train/*.arrow", (0, 2)),
    "run_clm": ("run_clm's three columns, plain permutation", "run_clm.arrow", (0,)),
    "memmap": ("np.memmap as in nanoGPT, random offsets", "memmap.bin", (0,)),
}


def main() -> None:
    """Write the files, measure, delete the files, and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=400_000, help=f"Rows of {LENGTH} targets. (default: 400,000)")
    parser.add_argument("--batches", type=int, default=512, help=f"Cold batches of {ROWS} rows. (default: 512)")
    parser.add_argument("--rounds", type=int, default=3, help="Repetitions. (default: 3)")
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=list(CONTENDERS), help="Orders to measure.")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="Folder on the tested disk.")
    args = parser.parse_args()
    needed = (args.batches + WARM_BATCHES * (WARM_WINDOWS + 1)) * ROWS
    if sys.platform != "linux" or args.rows % 1000 or args.rows < needed:
        parser.error(f"This script needs Linux. Pass --rows as a multiple of 1,000, at least {needed:,}.")
    results: dict[tuple[str, int], list[Any]] = {(name, n): [] for name in args.only for n in CONTENDERS[name][2]}
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="read_rows-") as root:
        for files in {CONTENDERS[name][1] for name in args.only}:
            _apart(write, Path(root), files, args.rows)
        for turn in range(args.rounds):
            for name, workers in results if turn % 2 == 0 else reversed(results):
                found = _apart(measure, name, Path(root), workers, args.rows, args.batches, turn)
                print(f"round {turn + 1} {name}, {workers} workers: {found}", file=sys.stderr)
                results[name, workers].append(found)
    print(f"{time.strftime('%Y-%m-%d')}, {os.uname().machine}, {os.cpu_count()} cores, Linux {os.uname().release}")
    print(f"Python {sys.version.split()[0]}, torch {torch.__version__}, datasets {datasets.__version__}")
    print(f"{file_system(args.folder)}; {args.rows:,} rows, {ROWS} x {LENGTH} per batch", end="\n`")
    print("python", *sys.argv, end="`\n\n")
    print_table(results)


def _apart(call: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in a forked process and return its result."""
    # The memory maps and workers of the function are released when the process ends.
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        return pool.submit(call, *arguments).result()


def write(root: Path, files: str, rows: int) -> None:
    """Write `rows` rows of random token ids.

    `files` is a file name pattern of CONTENDERS. The pattern determines the file format.
    """
    source = np.random.default_rng(0)
    pieces = (source.integers(0, 50_257, 1000 * LENGTH, np.uint16) for _ in range(rows // 1000))
    if files == "train/*.arrow":
        lengths = np.full(1000, LENGTH + 1)
        blocks = ((source.integers(0, 50_257, lengths.sum(), np.uint16), lengths) for _ in range(rows // 1000))
        write_rows(root / "train", blocks, np.dtype(np.uint16), LENGTH + 1)
    elif files == "memmap.bin":
        with (root / files).open("wb") as file:
            file.writelines(piece.data for piece in pieces)
    else:  # the column types of `datasets`, in batches of 1,000 rows as its `map` writes them
        kinds = {"input_ids": pa.int32(), "attention_mask": pa.int8(), "labels": pa.int64()}
        schema = pa.schema({name: pa.list_(kind) for name, kind in kinds.items()})
        with pa.ipc.new_stream(str(root / files), schema) as writer:
            for ids in pieces:
                lists = [pa.FixedSizeListArray.from_arrays(pa.array(v), LENGTH) for v in (ids, np.ones_like(ids), ids)]
                writer.write_table(pa.table(lists, names=schema.names).cast(schema))


def open_batches(name: str, root: Path, workers: int, rows: int, seed: int) -> Any:
    """Return an iterable over the batches of a contender.

    `name` is a key of CONTENDERS. The function does not read any rows.
    """
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    if name == "memmap":

        def batch() -> dict[str, torch.Tensor]:
            ids = np.memmap(root / "memmap.bin", np.uint16, "r")  # nanoGPT opens the map for each batch
            starts = torch.randint(len(ids) - LENGTH, (ROWS,)).tolist()
            both = [[torch.from_numpy(ids[i + k : i + k + LENGTH].astype(np.int64)) for i in starts] for k in (0, 1)]
            return {"input_ids": torch.stack(both[0]), "labels": torch.stack(both[1])}

        return iter(batch, None)
    if name == "run_clm":
        dataset, collate = datasets.Dataset.from_file(str(root / "run_clm.arrow")), default_data_collator
    else:
        dataset, collate = open_rows(root / "train"), collate_rows
    order: Any = RandomSampler(dataset)
    if name in ("blocks", "sequential"):
        order = EpochSampler(rows, rows_per_step=ROWS, seed=seed, shuffle=name == "blocks")
    return DataLoader(dataset, ROWS, sampler=order, collate_fn=collate, num_workers=workers)


def measure(name: str, root: Path, workers: int, rows: int, cold: int, seed: int) -> dict[str, list[float]]:
    """Measure `cold` batches from the disk, then more batches from the page cache.

    Returns:
        a dictionary of lists. Keys that could not be measured are missing.

        - cold, warm: ms per batch
        - cpu: CPU time of the main process in ms per warm batch
        - KiB: KiB per row, read from the disk
        - before, after: percentage of the files that is in the page cache before and after the cold batches
    """
    source = open_batches(name, root, workers, rows, seed)
    files = list(root.glob(CONTENDERS[name][1]))
    for file in files:
        with file.open("rb") as opened:
            os.fsync(opened.fileno())  # unwritten pages cannot be dropped
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    before, read, start = cached(files), disk_bytes(), time.perf_counter()
    batches = iter(source)
    taken = sum(len(batch["input_ids"]) for batch in itertools.islice(batches, cold))
    seconds, read, after = time.perf_counter() - start, disk_bytes() - read, cached(files)
    found = {"before": [before], "after": [after]}
    if before < 5:  # pages that are mapped since the opening cannot be dropped
        found["cold"] = [seconds / taken * ROWS * 1e3]
        if read > 0.5 * (after - before) / 100 * sum(file.stat().st_size for file in files):
            found["KiB"] = [read / taken / 1024]
    for file in files:
        np.memmap(file, np.uint8, "r").max()
    for window in range(WARM_WINDOWS + 1) if cached(files) > 99 else ():
        start, cpu = time.perf_counter(), time.process_time()
        count = sum(1 for _ in itertools.islice(batches, WARM_BATCHES))
        if window:  # the first window empties the queues
            found.setdefault("warm", []).append((time.perf_counter() - start) / count * 1e3)
            found.setdefault("cpu", []).append((time.process_time() - cpu) / count * 1e3)
    return found


def cached(files: list[Path]) -> float:
    """Return how many percent of the files are in the page cache."""
    held = []
    for pages in (np.memmap(file, np.uint8, "r") for file in files):
        held.append(np.ones(-(-pages.size // os.sysconf("SC_PAGE_SIZE")), np.uint8))  # 1 (cached) if the call fails
        ctypes.CDLL(None).mincore(pages.ctypes, ctypes.c_size_t(pages.size), held[-1].ctypes)
    return 100 * float((np.concatenate(held) & 1).mean())


def disk_bytes() -> int:
    """Return how many bytes this process and its workers have read from block devices."""
    processes = ["self", *(str(child.pid) for child in multiprocessing.active_children())]
    return sum(
        int(Path("/proc", p, "io").read_text(encoding="utf-8").split("read_bytes:")[1].split()[0]) for p in processes
    )


def file_system(folder: Path) -> str:
    """Describe the type, device and read-ahead of a folder's file system."""
    mounts = [line.split() for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()]
    above = [(len(m[4]), m[m.index("-") + 1], m[2]) for m in mounts if folder.resolve().is_relative_to(m[4])]
    block = Path("/sys/dev/block", max(above)[2])
    places = [block / up / "queue/read_ahead_kb" for up in (".", "..")]  # a partition has it one folder up
    ahead = [place.read_text(encoding="utf-8").strip() + " KiB" for place in places if place.exists()] or ["unknown"]
    return f"{max(above)[1]} on {'a' if block.exists() else 'no'} block device, read-ahead {ahead[0]}"


def print_table(results: dict[tuple[str, int], list[dict[str, list[float]]]]) -> None:
    """Print medians (min to max) as a Markdown table."""
    print("| rows and order | workers | KiB per row, cold | % in cache before | % in cache after", end=" | ")
    print("rows/s, relative speed, cold | ms per batch, cold | rows/s, relative speed, warm", end=" | ")
    print("ms per batch, warm | CPU ms of the main process, warm |\n" + "|" + " --- |" * 10)
    first: dict[str, float] = {}
    for (name, workers), rounds in results.items():
        cells = dict.fromkeys(("KiB", "before", "after", "cold/s", "cold"), "not measured: not read from a disk")
        cells |= dict.fromkeys(("warm/s", "warm", "cpu"), "not measured: larger than memory")
        for key in tuple(cells):
            if values := [value for found in rounds for value in found.get(key, ())]:
                median = float(np.median(values))
                cells[key] = f"{median:.2f} ({min(values):.2f} to {max(values):.2f})"
                if key in ("cold", "warm"):
                    cells[key + "/s"] = f"{ROWS * 1e3 / median:,.0f}, {first.setdefault(key, median) / median:.2f}"
        print("|", " | ".join([CONTENDERS[name][0], str(workers), *cells.values()]), "|")


if __name__ == "__main__":
    main()

"""Compare single kernels of a training step of GPT-2 124M on a GPU, in about a minute.

    python benchmarks/kernels.py --out kernels                       # a GPU
    python benchmarks/kernels.py --out kernels --device cpu --small  # test this script

The candidates are listed in kernel_plan.py, the most important ones first: attention, the MLP, the matrix products of a
step with twice as many rows, and the loss. Each line of the table has a candidate's largest error of the output and its
gradients, relative to an fp32 reference, the same error of torch's bf16, the median time of forward and backward pass,
and the ratio of this time to that of the kernel that train.py uses. A wrong candidate is never named as the fastest one.
For products, the time is that of twice as many rows, and the ratio compares times per row.

One process without Trainer measures all candidates. If a candidate is missing or fails, its line has the reason. If it
hangs or breaks the device, the process is killed, and a new one continues with the next candidate. Results are in
kernels.jsonl and kernels.md after each line.

For a machine without a network, `pip download --no-deps --only-binary :all:` gets the wheels (sizes for Python 3.11):

packed_attention  nvidia-cudnn-frontend 1.32.0 (11.6 MB)
gelu_mlp          nvmath-python 1.0.0 (5.5 MB), cuda-core 1.2.2 (6.5 MB)
QuACK             quack-kernels 0.6.5 (0.7 MB), apache-tvm-ffi 0.1.15.post2 (3.3 MB), torch-c-dlpack-ext 0.1.5 (0.9 MB),
                  einops 0.8.2 (0.1 MB), and of version 4.8.1: nvidia-cutlass-dsl (0.01 MB),
                  nvidia-cutlass-dsl-libs-base (3.1 MB), -libs-core (1.6 MB) and -libs-cu13 (92 MB)
FlashAttention-4  flash-attn-4 4.0.0b36 (0.5 MB), and the packages of QuACK
all               cuda-bindings 13 (8.4 MB) and cuda-pathfinder (0.1 MB), unless torch has installed them

A wheel is a zip file. Unpack all wheels into one folder with the name site-packages, because QuACK accepts functions of
cutlass only there, and set PYTHONPATH to this folder. If at most 64 MiB (67,108,864 bytes) can be copied at a time,
compress -libs-cu13 better, and split it if other files are copied with it:

    unzip -q nvidia_cutlass_dsl_libs_cu13-*.whl -d cu13
    tar -C cu13 -cf - . | xz -9e > cu13.tar.xz                 # 7 minutes on one core; 62,157,300 bytes
    split -b 40M cu13.tar.xz cu13.part-
    cat cu13.part-* | tar -xJ -C carried/site-packages         # on the machine
"""

import argparse
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.gpu_results import append_line, replace_text
from benchmarks.kernel_plan import CANDIDATES, PRODUCTS, SMALL, Candidate, Shapes, is_entry_of, without_result
from benchmarks.machine import print_columns, print_row
from benchmarks.processes import kill_all


WORKER = [sys.executable, str(Path(__file__).resolve())]
START_SECONDS = 12  # a process does not start if less time is left
FIRST_LINE_SECONDS = 60  # limit until the first candidate begins: imports may be slow
LIMIT_FACTOR = 3.0  # limit of a candidate, relative to its `seconds`
LAYERS = 12  # of GPT-2 124M
COLUMNS = ("group", "candidate", "largest error", "of torch's bf16", "ms", "ratio", "remarks")
Entry = dict[str, Any]


class Comparison:
    """The results of all candidates, which are on disk as soon as they are measured."""

    def __init__(self, args: argparse.Namespace, words: list[str]) -> None:
        self.results: Path = args.results
        self.words = words
        self.deadline = time.time() + args.seconds
        self.num_read = 0  # lines
        self.entries: list[Entry] = []
        self.started: Entry | None = None  # the candidate that is measured now
        self.results.parent.mkdir(parents=True, exist_ok=True)
        self.results.unlink(missing_ok=True)
        print_columns(*COLUMNS)

    def waiting(self) -> list[Candidate]:
        """Return the candidates without a result."""
        return without_result(self.entries)

    def run(self) -> None:
        """Measure all candidates, in as few processes as possible."""
        while self.waiting():
            if self.deadline - time.time() < START_SECONDS:
                self.fail("no time is left", self.waiting())
                return
            num_tried = len(self.entries)
            reason = self.run_worker()
            if self.started is not None:
                [candidate] = [each for each in self.waiting() if is_entry_of(self.started, each)]
                self.fail(reason, [candidate])
            elif len(self.entries) == num_tried:
                self.fail(reason, self.waiting())

    def run_worker(self) -> str:
        """Measure candidates in a process until it ends, fails or hangs, and return the reason."""
        command = [*WORKER, "--worker_deadline", str(self.deadline), *self.words]
        log = self.results.with_name("kernels_worker.log")
        with log.open("ab") as output:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        began = time.time()
        try:
            while process.poll() is None:
                time.sleep(0.05)
                self.read()
                now = time.time()
                if now > self.limit(began):
                    return f"it was killed after {now - began:.0f} s"
        finally:
            kill_all(process)
            self.read()
        return f"the process ended with exit code {process.returncode}, see {log.name}"

    def limit(self, began: float) -> float:
        """Return when the process is killed, in seconds since the epoch."""
        if self.started is None:
            return min(self.deadline, began + FIRST_LINE_SECONDS)
        [candidate] = [each for each in CANDIDATES if is_entry_of(self.started, each)]
        return min(self.deadline, self.started["started"] + LIMIT_FACTOR * candidate.seconds)

    def read(self) -> None:
        """Read and print the new complete lines of the file of results."""
        if not self.results.is_file():
            return
        lines = self.results.read_text(encoding="utf-8").split("\n")[:-1]
        for line in lines[self.num_read :]:
            entry = json.loads(line)
            if "started" in entry:
                self.started = entry
                continue
            self.started = None
            self.entries.append(entry)
            print_row(*cells_of(entry))
        if len(lines) > self.num_read:
            self.num_read = len(lines)
            replace_text(self.results.with_suffix(".md"), self.table())

    def fail(self, reason: str, candidates: list[Candidate]) -> None:
        """Record why candidates have no result."""
        for candidate in candidates:
            append_line(self.results, {"group": candidate.group, "name": candidate.name, "error": reason})
        self.read()

    def table(self) -> str:
        """Return the results as Markdown."""
        rows = [COLUMNS, ["---"] * len(COLUMNS), *[cells_of(entry) for entry in self.entries]]
        lines = [f"| {' | '.join(row)} |" for row in rows]
        return "\n".join([*lines, "", *conclusions(self.entries)]) + "\n"


def cells_of(entry: Entry) -> list[str]:
    """Return the cells of a result in the table."""
    cells = [entry["group"], entry["name"]]
    formats = {"largest_error": ".2g", "bf16_error": ".2g", "ms": ".3f", "ratio": ".3f"}
    for key, form in formats.items():
        cell = "-"
        if key in entry:
            cell = format(entry[key], form)
        cells.append(cell)
    remark = entry.get("error", "")
    if "wrong" in entry:
        remark = f"WRONG: {entry['wrong']}"
    if "teraflops" in entry:
        remark = f"{rates(entry['teraflops'])} TFLOP/s; half as many rows: {rates(entry['teraflops_of_half'])}"
    cells.append(" ".join(remark.replace("|", " ").split()))
    return cells


def rates(teraflops: list[float]) -> str:
    return ", ".join(f"{value:g}" for value in teraflops)


def conclusions(entries: list[Entry]) -> list[str]:
    """Return the fastest right candidate of each group, and the time of all products."""
    lines: list[str] = []
    for group in dict.fromkeys(candidate.group for candidate in CANDIDATES):
        right = [each for each in entries if each["group"] == group and "ms" in each and "wrong" not in each]
        if group == PRODUCTS:
            lines += products_of_a_model(right)
        elif right:
            fastest = min(right, key=lambda each: each["ms"])
            lines.append(f"- Fastest {group}: {fastest['name']}, {fastest['ms']:.3f} ms.")
    return lines


def products_of_a_model(entries: list[Entry]) -> list[str]:
    """Return the time of all products with each number of rows, if all were measured."""
    num_products = sum(candidate.group == PRODUCTS for candidate in CANDIDATES)
    if len(entries) < num_products:
        return []
    once = 0.0
    twice = 0.0
    for entry in entries:
        count = LAYERS
        if entry["name"] == "lm_head":
            count = 1
        once += 2 * count * entry["ms_of_half"]
        twice += count * entry["ms"]
    text = f"- Products of {LAYERS} layers and the head: {twice:.2f} ms for twice as many rows in one pass"
    return [f"{text}, {once:.2f} ms in two passes ({twice / once:.3f})."]


def parse(words: list[str]) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("kernels"), help="Folder for the results. (default: kernels)")
    parser.add_argument("--seconds", type=float, default=70, help="Time limit. (default: %(default)s)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="(default: cuda)")
    parser.add_argument("--small", action="store_true", help="Small shapes, to test this script on a CPU.")
    parser.add_argument("--worker_deadline", type=float, help=argparse.SUPPRESS)  # seconds since the epoch
    args = parser.parse_args(words)
    args.results = args.out.resolve() / "kernels.jsonl"
    args.shapes = Shapes()
    if args.small:
        args.shapes = SMALL
    return args


def main(words: list[str]) -> None:
    """Compare all candidates, and print the table."""
    args = parse(words)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the process is killed
    if args.worker_deadline is not None:
        from benchmarks import kernel_worker  # imports torch

        kernel_worker.main(args.results, args.shapes, args.device, args.worker_deadline)
        return
    comparison = Comparison(args, words)
    comparison.run()
    print()
    for line in conclusions(comparison.entries):
        print(line)


if __name__ == "__main__":
    main(sys.argv[1:])

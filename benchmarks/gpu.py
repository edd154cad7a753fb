"""Measure everything that needs a GPU, within a time limit.

    python benchmarks/gpu.py --minutes 9 --out DIR [--nanogpt ~/nanoGPT] [--data_files 'books/*.jsonl.gz']

The parts, by value: times of the attention kernels, train_step.py with its contenders, a profile of two steps, and a real run with kill and resume (real_run.py). A part
that does not fit into the remaining time is skipped. Every part runs in its own processes, which share one cache of
compiled code. On a CPU all parts run with a small model, to test this script.
"""

import argparse
import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch


sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.processes import run_captured
from benchmarks.train_step import Setup, run, table


GPU = torch.cuda.is_available()
SHAPE, ROWS, PASSES = ("124m", 64, 4) if GPU else ("shakespeare", 12, 1)
# Shares of the time limit. Time that a part does not use is left for the next parts.
SHARES = {"attention": 0.06, "train_step": 0.5, "profile": 0.14, "real_run": 0.3}


class Parts:
    """The parts of the benchmark. Each method yields lines of Markdown."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.out = args, args.out.resolve()
        counts = {"warmup": 3, "steps": 4, "windows": 2}
        self.setup = Setup(SHAPE, ROWS, PASSES, **counts, compile=GPU, bf16=GPU, nanogpt=args.nanogpt)
        # The bare loop has the same dtype of weights.
        self.ours, self.bare = ("zero1", "bare_bf16") if importlib.util.find_spec("deepspeed") else ("trainer", "bare")

    def attention(self, seconds: float) -> Iterator[str]:
        words = [sys.executable, __file__, "--attention"]
        done = run_captured(words, timeout=seconds)
        yield done.stdout if done.returncode == 0 else done.stderr[-2000:]

    def train_step(self, seconds: float) -> Iterator[str]:
        until, results = time.monotonic() + seconds, {}
        names = ["zero1", self.bare] if self.ours == "zero1" else [self.bare]
        for name in [*names, "trainer", *["nanogpt"] * bool(self.args.nanogpt), "stock"]:
            results[name] = [run(name, self.setup, processes=1, timeout=until - time.monotonic())]
            (self.out / "train_step.json").write_text(json.dumps(results, indent=1), encoding="utf-8")
        yield table(self.setup, results)

    def profile(self, seconds: float) -> Iterator[str]:
        file = self.out / "profile.json"
        setup = dataclasses.replace(self.setup, profile=str(file))
        measured = run(self.ours, setup, processes=1, timeout=seconds)
        if "error" in measured:
            yield measured["error"]
            return
        profile = json.loads(file.read_text(encoding="utf-8"))
        yield f"two steps of {self.ours}: {profile['ms']:.1f} ms, a kernel runs in {profile['busy']:.1%} of the time\n"
        yield "| kernel | ms | calls |\n| --- | --- | --- |"
        yield from (f"| `{each['kernel'][:90]}` | {each['ms']:.2f} | {each['calls']} |" for each in profile["kernels"])

    def real_run(self, seconds: float) -> Iterator[str]:
        if not self.args.data_files:
            yield "skipped: needs --data_files"
            return
        small = ["--tokenizer", "train:1024", "--processes", "2", "--steps", "24", "--eval_tokens", "4096", "--"]
        small += ["--use_cpu", "--n_layer", "2", "--n_head", "2", "--n_embd", "64", "--warmup_steps", "10"]
        small += ["--tokens_per_step", "2048", "--per_device_train_batch_size", "1"]
        words = ["--data_files", *self.args.data_files, "--work", str(self.out / "real_run"), "--steps", "40"]
        command = [sys.executable, "benchmarks/real_run.py", *words, *([] if GPU else small)]
        done = run_captured(command, timeout=seconds)
        yield done.stdout[-6000:] or done.stderr[-2000:]


def time_attention() -> None:
    """Print the times of all attention kernels for one row shape, as Markdown."""
    from transformers import GPT2Config

    from gpt2_repro.model.attention import HUB_KERNEL, PACKAGE, Machine, obstacle, time_kernels
    from gpt2_repro.model.pretraining import SDPA

    length = 1024 if GPU else 128
    machine = Machine(GPU, bf16=GPU, length=length)
    config = GPT2Config(n_positions=length, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    obstacles = {name: obstacle(name, machine) for name in (PACKAGE, HUB_KERNEL, *SDPA)}
    timings = time_kernels(obstacles, machine, config, ROWS)
    print(f"forward and backward, {ROWS} x 12 x {length} x 64\n\n| kernel | ms |\n| --- | --- |")
    for name, time_ in timings.items():
        print(f"| {name} | {time_ if isinstance(time_, str) else f'{time_:.2f}'} |")


def main() -> None:
    """Run the parts one after another until the time is over."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9, help="Time limit of all parts. (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("gpu"), help="Folder for the results. (default: gpu)")
    parser.add_argument("--nanogpt", default="", help="Folder of a nanoGPT checkout.")
    parser.add_argument("--data_files", nargs="+", default=[], help="Text or a prepared folder for the real run.")
    parser.add_argument("--attention", action="store_true", help=argparse.SUPPRESS)
    parts_help = "Parts to run: %(choices)s. (default: all)"
    parser.add_argument("--parts", nargs="+", choices=SHARES, default=list(SHARES), help=parts_help)
    args = parser.parse_args()
    if args.attention:
        return time_attention()
    began, parts = time.monotonic(), Parts(args)
    args.out.mkdir(parents=True, exist_ok=True)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(args.out.resolve() / "inductor")
    with (args.out / "gpu.md").open("w", buffering=1, encoding="utf-8") as report:
        for number, name in enumerate(args.parts):
            left = args.minutes * 60 - (time.monotonic() - began)
            seconds = left * SHARES[name] / sum(SHARES[each] for each in args.parts[number:])
            report.write(f"\n## {name}\n\n")
            start = time.monotonic()
            try:
                for line in getattr(parts, name)(seconds):
                    report.write(line + "\n")
            except subprocess.TimeoutExpired:
                report.write(f"not finished within {seconds:.0f} s\n")
            report.write(f"\n{time.monotonic() - start:.0f} s\n")
    print((args.out / "gpu.md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()

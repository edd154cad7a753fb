"""Compare the speed and memory of this project with those of other training loops.

    python benchmarks/train_step.py                              # on a GPU: 124M, 64 rows of 1024 tokens
    python benchmarks/train_step.py --shape shakespeare          # nanoGPT's CPU configuration
    python benchmarks/train_step.py --nanogpt ~/nanoGPT          # also nanoGPT's model and loop
    python benchmarks/train_step.py --only trainer bare zero1 bare_bf16 --processes 2

The contenders are this project and training loops that a user could use instead. The contenders run on a GPU if there
is one. Each contender runs in a fresh process. Odd rounds run the contenders in order, even rounds in reverse order,
so that a slow minute of a shared machine affects all of them. Only numbers of the same run of this script can be
compared. The contenders do not import datasets, deepspeed or lm_eval, except for `zero1`, which uses DeepSpeed.
"""

import argparse
import dataclasses
import datetime
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from contenders import SHAPES, Setup
from processes import ROOT, run_captured


sys.path.insert(0, str(ROOT))

CONTENDERS = {
    "trainer": "this project, one process",
    "masked": "this project, attention inside documents",
    "ddp": "this project under DDP",
    "zero1": "this project under DeepSpeed ZeRO-1",
    "bare": "PyTorch loop, this project's model and loss",
    "bare_bf16": "the same loop with bf16 weights and fp32 masters",
    "nanogpt": "nanoGPT's model and loop",
    "stock": "stock GPT2Config() and Trainer",
}
# In bf16, these contenders have bf16 weights and fp32 masters. The others have fp32 weights and use autocast.
BF16_WEIGHTS = ("zero1", "bare_bf16")


def main() -> None:
    """Measure the contenders, print a Markdown table, and write all numbers to --out."""
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="124m" if gpu else "shakespeare")
    parser.add_argument("--micro_batch", type=int, help="Rows per micro-batch. (124m: 64, shakespeare: 12)")
    parser.add_argument("--accumulation", type=int, default=1, help="Micro-batches per step.")
    parser.add_argument("--warmup", type=int, default=5, help="Steps before the first window.")
    parser.add_argument("--steps", type=int, default=10 if gpu else 50, help="Steps per window.")
    parser.add_argument("--windows", type=int, default=3, help="Windows per round.")
    parser.add_argument("--rounds", type=int, default=1 if gpu else 2, help="Repetitions per contender.")
    parser.add_argument("--processes", type=int, default=max(1, torch.cuda.device_count()), help="For ddp and zero1.")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=gpu, help="Use torch.compile.")
    parser.add_argument("--bf16", action=argparse.BooleanOptionalAction, default=gpu, help="Use bf16, not fp32.")
    parser.add_argument("--nanogpt", default="", help="Folder of a nanoGPT checkout.")
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, help="Run only these contenders.")
    parser.add_argument("--timeout", type=int, default=300, help="Time limit of one process in seconds.")
    parser.add_argument("--out", type=Path, help="JSON file for all measurements.")
    args = parser.parse_args()
    names = args.only or [
        "trainer",
        "bare",
        *(["zero1", "bare_bf16"][: 1 + args.bf16] if importlib.util.find_spec("deepspeed") else []),
        *(["nanogpt"] if args.nanogpt else []),
        "stock",
    ]
    if "nanogpt" in names and not Path(args.nanogpt, "model.py").is_file():
        parser.error("nanogpt needs a checkout with model.py. Pass --nanogpt PATH.")
    taken = {field.name: getattr(args, field.name) for field in dataclasses.fields(Setup) if hasattr(args, field.name)}
    setup = Setup(**taken | {"micro_batch": args.micro_batch or {"124m": 64, "shakespeare": 12}[args.shape]})

    results: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for turn in range(args.rounds):
        for name in names if turn % 2 == 0 else reversed(names):
            measured = run(name, setup, processes=args.processes, timeout=args.timeout)
            print(f"round {turn + 1} {name}: {measured.get('error') or measured['seconds']}", file=sys.stderr)
            results[name].append(measured)
            if args.out:
                args.out.write_text(
                    json.dumps({"setup": dataclasses.asdict(setup), "results": results}, indent=1), encoding="utf-8"
                )
    print(table(setup, results))


def run(name: str, setup: Setup, *, processes: int, timeout: int) -> dict[str, Any]:
    """Run one contender in a separate process and return its measurements.

    If the contender fails, the result is {"error": …}.
    """
    python = [sys.executable]
    if name == "ddp":
        python += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    elif name == "zero1":
        config = ["--config_file", "accelerate_configs/zero1.yaml", "--num_processes", str(processes)]
        python += ["-m", "accelerate.commands.launch", *config, "--main_process_port", "0"]
    command = [*python, "benchmarks/contenders.py", name, json.dumps(dataclasses.asdict(setup))]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    try:
        done = run_captured(command, env=environment, timeout=timeout)
    except subprocess.TimeoutExpired:
        return {"error": f"not finished within {timeout} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        last = [line for line in done.stderr.splitlines() if "Error" in line] or ["failed"]
        return {"error": last[-1][:200], "stderr": done.stderr[-4000:]}
    return json.loads(lines[-1])


def table(setup: Setup, results: dict[str, list[dict[str, Any]]]) -> str:
    """Return Markdown text with the machine, setup and a table of measurements."""
    from gpt2_repro.hardware import find_accelerator, peak_flops
    from gpt2_repro.model.size import flops_per_token, gpt2_parameters

    shape = setup.model
    size = {"n_layer": shape["n_layer"], "n_embd": shape["n_embd"]}
    length = shape["sequence_length"]
    parameters = gpt2_parameters(**size, n_positions=length, vocab_size=shape["vocab_size"])
    palm = flops_per_token(parameters=parameters - length * shape["n_embd"], **size, sequence_length=length)
    llmc = 6 * parameters + 6 * shape["n_layer"] * shape["n_embd"] * length
    accelerator = find_accelerator()
    peak = peak_flops(accelerator.name) if setup.bf16 else None
    tokens = setup.micro_batch * setup.accumulation * length

    lines = [
        f"{datetime.date.today()}, {accelerator.name}, {accelerator.count} "
        + ("GPUs" if accelerator.kind == "cuda" else f"cores, {torch.get_num_threads()} threads")
        + f", Python {platform.python_version()}, "
        + ", ".join(f"{name} {_version(name)}" for name in ("torch", "transformers", "accelerate", "deepspeed")),
        f"{setup.shape}: {setup.micro_batch} x {length} tokens x {setup.accumulation} passes per process and step, "
        f"{'bf16' if setup.bf16 else 'fp32'}, {'compiled' if setup.compile else 'eager'}; "
        f"{palm / 1e6:,.0f} M FLOPs per token (6N + 12LCT), {llmc / 1e6:,.0f} M (6N + 6LCT)",
        f"`python {' '.join(sys.argv)}`",
        "",
        "Relative speed: compared with the first contender that has the same dtype of weights",
        "",
        "| contender | weights | ms per step (min to max) | tokens/s | relative speed "
        "| MFU 6N + 12LCT | MFU 6N + 6LCT | peak memory | host syncs in 2 steps |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    first: dict[str, float] = {}
    for name, rounds in results.items():
        good = [measured for measured in rounds if "error" not in measured]
        if not good:
            lines.append(f"| {CONTENDERS[name]} | {rounds[0]['error'].replace('|', ' ')} | | | | | | | |")
            continue
        seconds = [second for measured in good for second in measured["seconds"]]
        median = statistics.median(seconds)
        speed = tokens * good[0]["processes"] / median
        weights = "fp32" if not setup.bf16 else "bf16" if name in BF16_WEIGHTS else "fp32, autocast"
        first.setdefault(weights, speed)
        share = [f"{speed * flops / (peak * good[0]['processes']):.1%}" if peak else "-" for flops in (palm, llmc)]
        waits = "-" if good[0]["waits"] is None else good[0]["waits"]
        lines.append(
            f"| {CONTENDERS[name]} | {weights} | {median * 1e3:.1f} ({min(seconds) * 1e3:.1f} to {max(seconds) * 1e3:.1f}) "
            f"| {speed:,.0f} | {speed / first[weights]:.3f} | {share[0]} | {share[1]} "
            f"| {max(measured['peak_bytes'] for measured in good) / 1e9:.1f} GB | {waits} |"
        )
    return "\n".join(lines)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "absent"


if __name__ == "__main__":
    main()

"""Compare how many tokens Muon and AdamW need to reach the same validation loss.

    python benchmarks/optimizers.py prose.jsonl

All runs use train.py on prose, on a CPU, with three seeds by default. The schedule is warmup_stable_decay without the
decay. With this schedule, the validation loss at any step is the final loss of a run that ends at this step. Each
optimizer trains with several learning rates, and with all seeds at each rate. For each optimizer, the rate with the
lowest mean final loss over the seeds is chosen. The mean is used because the losses of different seeds differ by half
a nat if the rate is slightly too high. The target loss is AdamW's mean final loss.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml


ROOT = Path(__file__).parents[1]
CONTEXT, STEP = 256, 8_192


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, help="Documents, .jsonl or .txt.")
    parser.add_argument("--steps", type=int, default=160, help=f"Optimizer steps of {STEP:,} tokens. (default: 160)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--adamw_rates", type=float, nargs="+", default=[1e-3, 2e-3, 4e-3])
    parser.add_argument("--muon_rates", type=float, nargs="+", default=[4e-3, 8e-3])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="optimizers-") as folder:
        work = Path(folder)
        recipe = prepare(work, args.text, args.steps)
        curves: dict[str, list[dict[int, float]]] = {}
        chosen: dict[str, float] = {}
        for optim, rates in (("adamw_torch", args.adamw_rates), ("muon", args.muon_rates)):
            tried = {}
            for rate in rates:
                tried[rate] = [curve(work, recipe, optim, rate, seed) for seed in args.seeds]
                print(
                    f"{optim} {rate:g}: last losses {', '.join(map('{:.4f}'.format, ends(tried[rate])))}", flush=True
                )
            chosen[optim] = min(tried, key=lambda rate: statistics.mean(ends(tried[rate])))
            curves[optim] = tried[chosen[optim]]
        print(outcome(curves, chosen))


def ends(curves: list[dict[int, float]]) -> list[float]:
    """Return the last loss of each curve.

    A curve is a dictionary from step to validation loss.
    """
    return [list(losses.values())[-1] for losses in curves]


def prepare(work: Path, text: Path, steps: int) -> Path:
    data = {"source": "files", "data_files": [str(text)], "tokenizer": "train:4096", "sequence_length": CONTEXT}
    data |= {"dataset_dir": str(work / "data"), "split": "hash", "validation_fraction": 0.03}
    training: dict[str, Any] = {"tokens_per_step": STEP, "max_steps": steps, "per_device_train_batch_size": 16}
    training |= {"warmup_steps": 20, "lr_scheduler_type": "warmup_stable_decay", "decay_fraction": 0.0}
    training |= {
        "accept_any_hardware": True,
        "eval_tokens": 65_536,
        "eval_steps": 10,
        "per_device_eval_batch_size": 32,
    }
    training |= {"sample_steps": 0, "save_strategy": "no", "dataloader_num_workers": 0}
    recipe = work / "recipe.yaml"
    model = {"n_layer": 4, "n_head": 4, "n_embd": 128}
    recipe.write_text(yaml.safe_dump({"data": data, "model": model, "training": training}))
    subprocess.run([sys.executable, "prepare_data.py", recipe], cwd=ROOT, check=True, capture_output=True)
    return recipe


def curve(work: Path, recipe: Path, optim: str, rate: float, seed: int) -> dict[int, float]:
    """Train a run with train.py, and return the validation losses by step."""
    run = work / f"{optim}-{rate}-{seed}"
    options = ["--optim", optim, "--learning_rate", str(rate), "--seed", str(seed), "--output_dir", str(run)]
    subprocess.run([sys.executable, "train.py", recipe, *options], cwd=ROOT, check=True, capture_output=True)
    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {event["step"]: event["eval_loss"] for event in events if "eval_loss" in event}


def reached(losses: dict[int, float], target: float) -> float | None:
    """Return the step, interpolated, at which the loss reaches the target, or None."""
    before = None
    for step, loss in losses.items():
        if loss <= target:
            return (
                step if before is None else before[0] + (step - before[0]) * (before[1] - target) / (before[1] - loss)
            )
        before = (step, loss)
    return None


def outcome(curves: dict[str, list[dict[int, float]]], chosen: dict[str, float]) -> str:
    """Return a Markdown table of final losses, and a line about a target loss.

    The line contains the tokens that AdamW and Muon need to reach the target loss. The target loss is AdamW's mean
    final loss over the seeds.
    """
    # By definition, AdamW needs the tokens of a complete run, on average, to reach this loss.
    target, steps = statistics.mean(ends(curves["adamw_torch"])), max(curves["adamw_torch"][0])
    taken = [reached(losses, target) for losses in curves["muon"]]
    lines = ["| optimizer | learning rate | last validation losses |", "| --- | --- | --- |"]
    for optim, runs in curves.items():
        lines.append(f"| {optim} | {chosen[optim]:g} | {', '.join(f'{loss:.4f}' for loss in ends(runs))} |")
    shown = ", ".join("never" if step is None else f"{step:.0f}" for step in taken)
    lines.append(f"To loss {target:.4f}: AdamW {steps * STEP:,} tokens, Muon by seed {shown} steps of {STEP:,} tokens")
    if there := [step for step in taken if step is not None]:
        lines[-1] += f", on average {statistics.mean(there) / steps:.2f} of AdamW's"
    return "\n".join(lines)


if __name__ == "__main__":
    main()

"""Compare AdamW, Muon and averaging on GPT-2 shapes of three sizes.

    OMP_NUM_THREADS=1 python benchmarks/optimizers.py prose.jsonl --folder optimizers --hours 12

Each run trains a GPT-2 with train.py on a CPU: a vocabulary of 2,048, 5M tokens of prose, in steps of 8,192 tokens.
The sizes 1M and 4M are trained in bf16, which takes 0.8 and 0.6 of the time of fp32 on a CPU with AMX.
"adamw-6e-4" has the learning rate and the schedule of GPT-2 124M. Each other arm tries the same number of learning
rates at the smallest size with one seed. At the next sizes it tries the best of them and one neighbour, and the rates
in FURTHER. The best rate of a size then trains with all seeds of this size. The arm "muon-average" has a constant learning rate after the
warm-up, and averages the weights over a tenth of the steps. Its loss is that of the average.

The script can be interrupted at any time. The same command continues: the losses of finished runs are in
benchmarks/results/optimizers.jsonl, one line a run, and an interrupted run is resumed. `--hours 0` only prints the table
of the finished runs. Two calls with different `--arms` can share the folder and run side by side.
"""

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml


sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.processes import ROOT, logged


RESULTS = ROOT / "benchmarks" / "results" / "optimizers.jsonl"
CONTEXT, STEP, STEPS = 256, 8_192, 610  # 5.0M tokens
SIZES = {  # layers, width, bf16, seeds
    "0.3M": (3, 96, False, (1, 2, 3)),
    "1M": (5, 128, True, (1, 2, 3)),
    "4M": (5, 256, True, (1, 2)),
}
WSD = ["--lr_scheduler_type", "warmup_stable_decay", "--decay_fraction", "0.4"]
BASELINE, AVERAGED = "adamw-6e-4", "muon-average"
ARMS: dict[str, tuple[list[str], list[float]]] = {  # options, learning rates
    BASELINE: (["--optim", "adamw_torch_fused"], [6e-4]),
    "adamw": (["--optim", "adamw_torch_fused", *WSD], [1e-3, 2e-3, 4e-3, 8e-3]),
    "muon": (["--optim", "muon", *WSD], [4e-3, 8e-3, 1.6e-2, 3.2e-2]),
    AVERAGED: (
        ["--optim", "muon", "--lr_scheduler_type", "constant", "--ema_steps", str(STEPS // 10)],
        [2e-3, 4e-3, 8e-3, 1.6e-2],
    ),
}
# AdamW's two rates at 4M turned out to be too high, so that Muon would look better than it is.
FURTHER = {("4M", "adamw"): [1e-3, 2e-3]}


class Curve(NamedTuple):
    """The validation losses of a finished run by step, and its seconds per step."""

    losses: dict[int, float]
    seconds: float

    @property
    def last(self) -> float:
        return self.losses[STEPS]


class Study:
    """Trains the runs of a study that are missing in its file of results, until the time is over."""

    def __init__(self, results: Path, folder: Path, hours: float) -> None:
        self.results, self.folder, self.deadline = results, folder, time.time() + hours * 3600
        lines = results.read_text(encoding="utf-8").splitlines() if results.is_file() else []
        self.finished = {
            line["run"]: Curve({int(step): loss for step, loss in line["losses"].items()}, line["seconds"])
            for line in map(json.loads, lines)
        }

    def curve(self, name: str, words: list[object], **recorded: object) -> Curve | None:
        """Return a run, trained now if necessary, or None if there is no time."""
        if name not in self.finished:
            run, left = self.folder / name, (self.deadline - time.time()) / 3600
            if left <= 0:
                return None
            status = run / "run_status.json"
            used = json.loads(status.read_text(encoding="utf-8")).get("seconds", 0.0) if status.is_file() else 0.0
            command = ["train.py", *words, "--output_dir", run, "--max_hours", used / 3600 + left]
            process = subprocess.Popen([sys.executable, *map(str, command)], cwd=ROOT, stdout=subprocess.DEVNULL)
            _, ended, usage = os.wait4(process.pid, 0)
            if ended:
                raise subprocess.CalledProcessError(os.waitstatus_to_exitcode(ended), process.args)
            recorded["cpu_seconds"] = usage.ru_utime
            if not (run / "final").is_dir():
                return None
            curve = self.finished[name] = read(run)
            with self.results.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"run": name, **recorded, **curve._asdict()}) + "\n")
            shutil.rmtree(run)
            print(f"{name}: {curve.last:.4f}", flush=True)
        return self.finished[name]


def sizes(study: Study, recipe: Path, arms: list[str]) -> Iterator[tuple[str, str, dict[float, Curve], list[Curve]]]:
    """Yield size, arm, learning rates with their curves, curves of all seeds.

    The curves by learning rate are of the first seed, and those of all seeds have the best rate.
    All arms of a size come before the next size.
    """

    def curve(size: str, arm: str, rate: float, seed: int) -> Curve | None:
        bf16 = SIZES[size][2]
        words = [recipe, *ARMS[arm][0], "--learning_rate", rate, "--seed", seed, "--bf16", bf16, *shape(size)]
        return study.curve(f"{size}-{arm}-{rate:g}-{seed}", words, bf16=bf16)

    rates = {arm: rates for arm, (_, rates) in ARMS.items()}
    for size, (*_, seeds) in SIZES.items():
        for arm in arms:
            rates[arm] = sorted({*rates[arm], *FURTHER.get((size, arm), [])})
            curves_by_rate = {rate: curve(size, arm, rate, 1) for rate in rates[arm]}
            tried = {rate: found for rate, found in curves_by_rate.items() if found}
            if len(tried) < len(rates[arm]):
                return
            ranked = sorted(tried, key=lambda rate: tried[rate].last)
            best = ranked[0]
            curves = [curve(size, arm, best, seed) for seed in seeds]
            yield size, arm, tried, [found for found in curves if found]
            # The neighbour with the lower loss is tried at the next size.
            near = [rate for rate in ranked[1:] if abs(rates[arm].index(rate) - rates[arm].index(best)) == 1]
            rates[arm] = sorted([best, *near[:1]])


def shape(size: str) -> list[object]:
    layers, width, *_ = SIZES[size]
    return ["--n_layer", layers, "--n_embd", width, "--n_head", width // 32]


def read(run: Path) -> Curve:
    speeds = [event["tokens_per_second"] for event in logged(run, "tokens_per_second").values()]
    validations = logged(run, "eval_loss").items()
    # Before the first step there is no average.
    losses = {step: event.get("eval_EMA_loss", event["eval_loss"]) for step, event in validations}
    return Curve(losses, STEP / statistics.median(speeds))


def prepare(folder: Path, text: Path) -> Path:
    """Prepare the data once, and return the recipe that all runs share."""
    data: dict[str, Any] = {"source": "files", "data_files": [str(text.resolve())], "tokenizer": "train:2048"}
    data |= {"dataset_dir": str(folder / "data"), "sequence_length": CONTEXT, "max_tokens": 6_000_000}
    data |= {"split": "hash", "validation_fraction": 0.03}
    training: dict[str, Any] = {"tokens_per_step": STEP, "max_steps": STEPS, "per_device_train_batch_size": 32}
    training |= {"warmup_steps": 60, "eval_steps": 20, "eval_tokens": 65_536, "per_device_eval_batch_size": 32}
    training |= {"accept_any_hardware": True, "sample_steps": 0, "dataloader_num_workers": 0, "keep_checkpoints": 1}
    training |= {"keep_best_checkpoint": False, "report_to": "none"}
    recipe = folder / "recipe.yaml"
    folder.mkdir(parents=True, exist_ok=True)
    recipe.write_text(yaml.safe_dump({"data": data, "training": training}), encoding="utf-8")
    subprocess.run([sys.executable, "prepare_data.py", recipe], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return recipe


def share_of_steps(losses: dict[int, float], target: float) -> float:
    """Return the share of the steps after which the loss reaches the target, or infinity.

    It is interpolated between validations.
    """
    before = (0, math.inf)
    for step, loss in losses.items():
        if loss <= target:
            return (step - (step - before[0]) * (target - loss) / (before[1] - loss)) / STEPS
        before = step, loss
    return math.inf


def reached(losses: dict[int, float], target: float) -> str:
    share = share_of_steps(losses, target)
    return f"{share:.2f}" if share < math.inf else ">1"


def mean(curves: list[Curve]) -> dict[int, float]:
    steps = [step for step in curves[0].losses if all(step in curve.losses for curve in curves)]
    return {step: statistics.mean(curve.losses[step] for curve in curves) for step in steps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, help="Documents, .jsonl or .txt.")
    parser.add_argument("--folder", type=Path, default=Path("optimizers"), help="Folder of all runs.")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), help="Default: all.")
    parser.add_argument("--hours", type=float, default=12.0, help="Time for this call. (default: 12)")
    args = parser.parse_args()
    folder = args.folder.resolve()
    study, recipe = Study(RESULTS, folder, args.hours), prepare(folder, args.text)
    references = BASELINE, "adamw"
    header = ["size", "arm", "last validation loss of seed 1 by learning rate", "at the best rate: mean (seeds)"]
    header += [f"share of the tokens to the mean loss of {arm}" for arm in references] + ["s per step"]
    print(f"| {' | '.join(header)} |\n{'| --- ' * len(header)}|")
    targets: dict[tuple[str, str], float] = {}
    for size, arm, tried, curves in sizes(study, recipe, args.arms):
        losses, seeds = mean(curves), [curve.losses for curve in curves]
        targets[size, arm] = losses[STEPS]
        cells = [size, arm, ", ".join(f"{rate:g}: {curve.last:.4f}" for rate, curve in tried.items())]
        cells.append(f"{losses[STEPS]:.4f} ({', '.join(f'{each[STEPS]:.4f}' for each in seeds)})")
        for reference in references:
            target = targets.get((size, reference))
            shares = [] if target is None else [reached(each, target) for each in (losses, *seeds)]
            cells.append(f"{shares[0]} ({', '.join(shares[1:])})" if shares else "-")
        cells.append(f"{statistics.mean(curve.seconds for curve in curves):.2f}")
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()

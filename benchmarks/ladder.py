"""Train each rung of recipes/ladder at small sizes, with AdamW and with Muon.

    OMP_NUM_THREADS=1 python -m benchmarks.ladder prose.jsonl --folder ladder --hours 2

A rung changes one thing of the rung before. Data, schedule and shapes are those of benchmarks/optimizers.py (5.0M
tokens), in bf16. Each rung tries the same two learning rates with seed 1. The better rate trains with all seeds. The
size 4M has not been run yet.

The script can be interrupted at any time. The same command continues: finished runs are in
benchmarks/results/ladder.jsonl, one line a run. Calls with different `--optimizers` can share the folder and run side
by side. `--hours 0` only prints the table of the finished runs, and draws docs/figures/ladder.png. `--at_once` trains
several runs side by side, which a GPU can share.
"""

import argparse
import itertools
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import yaml
from scipy.stats import t

from benchmarks.machine import device
from benchmarks.optimizers import (
    ARMS,
    CONTEXT,
    ROOT,
    SIZES,
    STEPS,
    Curve,
    Study,
    mean,
    prepare,
    reached,
    shape,
)
from gpt2_repro.config import JsonObject
from gpt2_repro.model.arguments import ModelArguments
from gpt2_repro.model.scale import ModelScale, scale_of


# Each rung, and the rung that it changes.
BEFORE = {
    **{"0_gpt2": "", "1_rope": "0_gpt2", "2_no_bias": "1_rope", "3_rmsnorm": "2_no_bias", "4_relu2": "3_rmsnorm"},
    **{"4_swiglu": "3_rmsnorm", "5_gqa": "4_swiglu", "5_qk_norm": "4_swiglu", "6_post_norm": "5_qk_norm"},
    "7_moe": "4_swiglu",
}
FIRST = "0_gpt2"
SEEDS = {"0.3M": (1, 2, 3), "1M": (1, 2), "4M": (1, 2)}
# The best two rates of rung 0 in the study of the optimizers.
RATES = {
    **{(size, "adamw"): (4e-3, 8e-3) for size in SEEDS},
    **{(size, "muon"): (8e-3, 1.6e-2) for size in SEEDS},
    ("4M", "adamw"): (2e-3, 4e-3),
}


class Arm(NamedTuple):
    size: str
    optimizer: str
    rung: str

    def run(self, rate: float, seed: int) -> str:
        return f"{self.size}-{self.rung}-{self.optimizer}-{rate:g}-{seed}"


class Result(NamedTuple):
    """The curves of an arm: of seed 1 by rate, and of all seeds at the best rate."""

    by_rate: dict[float, Curve]
    rate: float
    curves: list[Curve]

    @property
    def loss(self) -> float:
        return statistics.mean(curve.last for curve in self.curves)


class Ladder:
    """The arms of the study, and the runs that they need."""

    def __init__(self, study: Study, common: Path, args: argparse.Namespace) -> None:
        self.study, self.common, self.at_once = study, common, args.at_once
        self.arms = [Arm(*each) for each in itertools.product(args.sizes, args.optimizers, BEFORE)]

    def model(self, arm: Arm) -> dict[str, Any]:
        """Return the section `model:` of the rung."""
        path = ROOT / "recipes" / "ladder" / f"{arm.rung}.yaml"
        model: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8")).get("model", {})
        if arm.rung == "5_gqa":  # as for 124M a third, these shapes have half as many heads of keys and values
            model["config_overrides"]["num_key_value_heads"] = SIZES[arm.size][1] // 64
        return model

    def scale(self, arm: Arm) -> ModelScale:
        model, (layers, width, *_) = self.model(arm), SIZES[arm.size]
        model["config_overrides"] = JsonObject(model.get("config_overrides", {}))
        section = ModelArguments(**model, n_layer=layers, n_embd=width, n_head=width // 32)
        return scale_of(section, sequence_length=CONTEXT, vocab_size=2048)

    def curve(self, arm: Arm, rate: float, seed: int) -> None:
        recipe = self.study.folder / f"{arm.run(rate, seed)}.yaml"
        values = yaml.safe_load(self.common.read_text(encoding="utf-8")) | {"model": self.model(arm)}
        values["training"] |= {"eval_steps": STEPS // 10}
        recipe.write_text(yaml.safe_dump(values), encoding="utf-8")
        words: list[object] = [recipe, *ARMS[arm.optimizer][0], "--learning_rate", rate, "--seed", seed]
        words += ["--bf16", True, "--torch_compile", False, *shape(arm.size)]
        try:
            self.study.curve(arm.run(rate, seed), words, device=device())
        except subprocess.CalledProcessError as error:
            print(f"{arm.run(rate, seed)} failed: {error}", file=sys.stderr)

    def train(self) -> None:
        """Train what is missing: first all rungs with seed 1, then each further seed, then the next size."""
        with ThreadPoolExecutor(self.at_once) as pool:
            for size, group in itertools.groupby(self.arms, key=lambda arm: arm.size):
                arms = list(group)
                rates = [(arm, rate, 1) for arm in arms for rate in RATES[arm[:2]]]
                list(pool.map(self.curve, *zip(*rates, strict=True)))
                best = [(arm, result.rate) for arm in arms if (result := self.result(arm))]
                seeds = [(arm, rate, seed) for seed in SEEDS[size][1:] for arm, rate in best]
                list(pool.map(self.curve, *zip(*seeds, strict=True)))

    def result(self, arm: Arm) -> Result | None:
        """Return the finished runs of an arm, or None before all rates are tried."""

        def find(rate: float, seed: int) -> Curve | None:
            return self.study.finished.get(arm.run(rate, seed))

        by_rate = {rate: curve for rate in RATES[arm[:2]] if (curve := find(rate, 1))}
        if len(by_rate) < len(RATES[arm[:2]]):
            return None
        rate = min(by_rate, key=lambda rate: by_rate[rate].last)
        curves = [curve for seed in SEEDS[arm.size] if (curve := find(rate, seed))]
        return Result(by_rate, rate, curves)

    def results(self) -> dict[Arm, Result]:
        return {arm: result for arm in self.arms if (result := self.result(arm))}


def interval(results: dict[Arm, Result], arm: Arm, other: Arm) -> tuple[float, float]:
    """Return the difference of the mean losses of two arms, and half its 95 % interval.

    The variance between seeds is pooled over all rungs of the same size and optimizer.
    """
    first, second = results[arm], results[other]
    pool = [result.curves for each, result in results.items() if each[:2] == arm[:2] and len(result.curves) > 1]
    freedom = sum(len(curves) - 1 for curves in pool)
    if not freedom:
        return first.loss - second.loss, math.nan
    squares = sum(statistics.variance(curve.last for curve in curves) * (len(curves) - 1) for curves in pool)
    error = math.sqrt(squares / freedom * (1 / len(first.curves) + 1 / len(second.curves)))
    return first.loss - second.loss, float(t.ppf(0.975, freedom)) * error


def rows(ladder: Ladder, results: dict[Arm, Result]) -> Iterator[list[str]]:
    """Yield the lines of the table."""
    yield ["size", "optimizer", "rung", "parameters, FLOPs of rung 0", "loss of seed 1 by learning rate"] + [
        *("mean (seeds)", "difference to the rung before", "share of the tokens to the loss of rung 0", "s per step")
    ]
    for arm, result in results.items():
        first, before = arm._replace(rung=FIRST), arm._replace(rung=BEFORE[arm.rung])
        scale, base = ladder.scale(arm), ladder.scale(first)
        cells = [*arm, f"{scale.active / base.active:.3f}, {scale.flops_per_token / base.flops_per_token:.3f}"]
        cells.append(", ".join(f"{rate:g}: {curve.last:.4f}" for rate, curve in result.by_rate.items()))
        cells.append(f"{result.loss:.4f} ({', '.join(f'{curve.last:.4f}' for curve in result.curves)})")
        difference, half = interval(results, arm, before) if before in results else (math.nan, math.nan)
        cells.append(f"{difference:+.4f} ± {half:.4f}" if before in results else "-")
        cells.append(reached(mean(result.curves), results[first].loss) if first in results else "-")
        cells.append(f"{statistics.mean(curve.seconds for curve in result.curves):.2f}")
        yield cells


def draw(results: dict[Arm, Result], path: Path) -> None:
    """Draw each rung's difference to the rung before, with intervals. RoPE is left out: its step is much larger."""
    shown = [
        arm for arm in results if BEFORE[BEFORE[arm.rung] or FIRST] and arm._replace(rung=BEFORE[arm.rung]) in results
    ]
    rungs, sizes = list(dict.fromkeys(arm.rung for arm in shown)), list(dict.fromkeys(arm.size for arm in shown))
    figure, axes = plt.subplots(1, len(sizes), figsize=(2 + 4 * len(sizes), 3.8), sharey=True, squeeze=False)
    for plot, size in zip(axes[0], sizes, strict=True):
        for optimizer, shift in (("adamw", -0.12), ("muon", 0.12)):
            arms = [arm for arm in shown if arm[:2] == (size, optimizer)]
            bars = [interval(results, arm, arm._replace(rung=BEFORE[arm.rung])) for arm in arms]
            places = [rungs.index(arm.rung) + shift for arm in arms]
            values, halves = [bar[0] for bar in bars], [bar[1] for bar in bars]
            plot.errorbar(values, places, xerr=halves, fmt="o", capsize=3, label=optimizer)
        plot.axvline(0, color="grey", linewidth=0.8)
        plot.set_yticks(range(len(rungs)), [f"{rung} after {BEFORE[rung]}" for rung in rungs])
        plot.set_ylim(len(rungs) - 0.5, -0.5)
        plot.set_xlabel("difference of the validation loss")
        plot.set_title(f"{size} parameters")
        plot.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, help="Documents, .jsonl or .txt.")
    parser.add_argument("--folder", type=Path, default=Path("ladder"), help="Folder of all runs.")
    parser.add_argument("--optimizers", nargs="+", choices=("adamw", "muon"), default=["adamw", "muon"])
    parser.add_argument("--sizes", nargs="+", choices=SEEDS, default=list(SEEDS))
    parser.add_argument("--at_once", type=int, default=1, help="Runs side by side. (default: 1)")
    parser.add_argument("--hours", type=float, default=2.0, help="Time for this call. (default: 2)")
    args = parser.parse_args()
    study = Study(ROOT / "benchmarks" / "results" / "ladder.jsonl", args.folder.resolve(), args.hours)
    common = prepare(study.folder, args.text) if args.hours else Path()
    ladder = Ladder(study, common, args)
    if args.hours:
        ladder.train()
    results = ladder.results()
    header, *lines = rows(ladder, results)
    print(f"| {' | '.join(header)} |\n{'| --- ' * len(header)}|")
    for cells in lines:
        print(f"| {' | '.join(cells)} |")
    used = [json.loads(line)["cpu_seconds"] for line in study.results.read_text(encoding="utf-8").splitlines()]
    print(f"{len(used)} runs, {sum(used) / 3600:.1f} CPU-hours")
    draw(results, ROOT / "docs" / "figures" / "ladder.png")


if __name__ == "__main__":
    main()

"""Draw the memory and the open files of the trial with spot machines (tests/faults/test_spot.py) over time.

    python benchmarks/spot_usage.py spot/usage.jsonl docs/figures/spot.png

A point is the sum over a command and its descendants, every 10 seconds. Shared pages are counted in each process.
"""

import argparse
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib


matplotlib.use("agg")
from matplotlib import pyplot as plt


COMMANDS = {"trainer": "training, all processes", "follower": "evaluate.sh --follow"}
GIGABYTE = 1e9


def read(path: Path) -> list[dict[str, Any]]:
    """Return the samples, in the order of time."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def growth(values: Sequence[float]) -> float:
    """Return the median of the last quarter of values in the order of time, divided by that of the first quarter."""
    quarter = max(1, len(values) // 4)
    first = sorted(values[:quarter])
    last = sorted(values[-quarter:])
    return last[len(last) // 2] / first[len(first) // 2]


def draw(samples: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw one panel for the memory and one for the open files."""
    figure, panels = plt.subplots(2, 1, figsize=(7, 4.6), sharex=True)
    began = samples[0]["time"]
    for command, label in COMMANDS.items():
        chosen = [sample for sample in samples if sample["of"] == command]
        hours = [(sample["time"] - began) / 3600 for sample in chosen]
        memory = [sample["rss"] / GIGABYTE for sample in chosen]
        files = [sample["files"] for sample in chosen]
        panels[0].plot(hours, memory, ".", markersize=2, label=label)
        panels[1].plot(hours, files, ".", markersize=2, label=label)
    panels[0].set_ylabel("resident memory, GB")
    panels[1].set_ylabel("open files")
    panels[1].set_xlabel("hours")
    for axes in panels:
        axes.set_ylim(bottom=0)
    panels[0].legend(markerscale=4, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def main() -> None:
    """Draw the figure, and print how much memory and files have grown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("usage", type=Path, help="usage.jsonl of the trial.")
    parser.add_argument("figure", type=Path, help="The PNG file to write.")
    args = parser.parse_args()
    samples = read(args.usage)
    draw(samples, args.figure)
    cases = dict.fromkeys(sample["run"].partition("-")[0] for sample in samples)  # the keys, in order
    for case, command, key in itertools.product(cases, COMMANDS, ("rss", "files")):
        values: list[float] = []
        for sample in samples:
            if sample["run"].startswith(f"{case}-") and sample["of"] == command:
                values.append(sample[key])
        print(f"{case}, {command}, {key}: last quarter / first quarter = {growth(values):.3f}")


if __name__ == "__main__":
    main()

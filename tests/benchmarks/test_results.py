"""The table of the optimizer study in RESULTS.md agrees with its raw file."""

import json
import re

from benchmarks.optimizers import BASELINE, RESULTS, STEPS, Curve, mean, reached
from tests.sections import ROOT


def test_optimizer_table_is_that_of_the_raw_file() -> None:
    curves: dict[tuple[str, str], dict[tuple[str, int], Curve]] = {}
    for line in RESULTS.read_text(encoding="utf-8").splitlines():
        run = json.loads(line)
        if name := re.fullmatch(r"([\d.]+M)-(.+)-([\d.]+)-(\d)", run["run"]):
            size, arm, rate, seed = name.groups()
            losses = {int(step): loss for step, loss in run["losses"].items()}
            curves.setdefault((size, arm), {})[rate, int(seed)] = Curve(losses, run["seconds"])

    def best_seeds(size: str, arm: str) -> list[Curve]:
        by_rate = {rate: curve.last for (rate, seed), curve in curves[size, arm].items() if seed == 1}
        best = min(by_rate, key=by_rate.__getitem__)
        return [curve for (rate, _), curve in sorted(curves[size, arm].items()) if rate == best]

    page = (ROOT / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([\d.]+M) \| ([a-z][\w-]*) \| (.*) \|$", page, re.MULTILINE)
    assert {(size, arm) for size, arm, _ in rows} == set(curves)
    for size, arm, cells in rows:
        tried = sorted((float(rate), curve) for (rate, seed), curve in curves[size, arm].items() if seed == 1)
        seeds = best_seeds(size, arm)
        average = mean(seeds)
        expected = [", ".join(f"{rate:g}: {curve.last:.4f}" for rate, curve in tried)]
        expected.append(f"{average[STEPS]:.4f} ({', '.join(f'{curve.last:.4f}' for curve in seeds)})")
        for other in (BASELINE, "adamw"):
            share = reached(average, mean(best_seeds(size, other))[STEPS])
            expected.append("-" if (arm, other) == (BASELINE, "adamw") else share)
        assert cells.split(" | ") == expected, (size, arm)

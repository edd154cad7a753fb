"""Each table in RESULTS.md agrees with the raw file that is named before it."""

import json
import math
import re
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from scipy.stats import t

from benchmarks.optimizers import BASELINE, SIZES, STEPS, Curve, mean, reached, share_of_steps
from tests.sections import ROOT


Row = dict[str, str]  # the cells of a row by column
SECTIONS = (ROOT / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8").split("\n## ")
TABLE = re.compile(r"^((?:\|.*\n)+)|results/([\w.-]+)", re.MULTILINE)
SEEDS, RATES = "at seed 1's best rate: mean (seeds)", "last validation loss of seed 1 by learning rate"


def printed(text: str) -> Iterator[Row]:
    """Yield the rows of the Markdown tables in a text."""
    text = re.sub(r"^[^|\n].*\n", "", text, flags=re.MULTILINE)  # a warning can be between two rows
    for table in filter(None, (found[1] for found in TABLE.finditer(text))):
        columns, _, *rows = ([cell.strip(" *") for cell in line[1:-1].split("|")] for line in table.splitlines())
        yield from (dict(zip(columns, row, strict=True)) for row in rows)


def optimizers(text: str) -> Iterator[Row]:
    """Yield the rows of the optimizer study, and of its extrapolation to GPT-2 124M."""
    arms: dict[tuple[str, str], dict[tuple[float, int], Curve]] = {}
    for run in map(json.loads, text.splitlines()):
        if name := re.fullmatch(r"([\d.]+M)-(.+)-([\d.]+)-(\d)", run["run"]):
            size, arm, rate, seed = name.groups()
            losses = {int(step): loss for step, loss in run["losses"].items()}
            arms.setdefault((size, arm), {})[float(rate), int(seed)] = Curve(losses, run["seconds"])
    best: dict[tuple[str, str], list[Curve]] = {}
    tried: dict[tuple[str, str], dict[float, float]] = {}
    for key, curves in arms.items():
        tried[key] = {rate: curve.last for (rate, seed), curve in sorted(curves.items()) if seed == 1}
        rate = min(tried[key], key=tried[key].__getitem__)
        best[key] = [curve for (other, _), curve in sorted(curves.items()) if other == rate]

    target = {key: mean(seeds)[STEPS] for key, seeds in best.items()}
    for (size, arm), seeds in best.items():
        average = mean(seeds)
        row = {"size": size, "arm": arm}
        row[RATES] = ", ".join(f"{x:g}: {loss:.4f}" for x, loss in tried[size, arm].items())
        row[SEEDS] = f"{average[STEPS]:.4f} ({', '.join(f'{curve.last:.4f}' for curve in seeds)})"
        row["share to adamw-6e-4"] = reached(average, target[size, BASELINE])
        yield row | {"share to adamw": "-" if arm == BASELINE else reached(average, target[size, "adamw"])}
    for arm in ("muon", "muon-average"):
        means = [(size, share_of_steps(mean(best[size, arm]), target[size, "adamw"])) for size in SIZES]
        points = [(of, share_of_steps(seed.losses, target[of, "adamw"])) for of in SIZES for seed in best[of, arm]]
        row = {"arm": arm, "124M": f"{at_124m(points)[0]:.2f}"}
        row["0.3M, 1M, 4M"] = ", ".join(f"{y:.2f}" for _, y in means)
        for name, values in (("from the seeds", points), ("from the means", means)):
            middle, half = at_124m(values)
            row[name] = f"{middle - half:.2f} to {middle + half:.2f}"
        yield row


def at_124m(points: list[tuple[str, float]]) -> tuple[float, float]:
    """Return the value at 124M of a line over the logarithm of the parameters, and half of its 95 % interval."""
    x = np.array([math.log(12 * SIZES[size][0] * SIZES[size][1] ** 2) for size, _ in points])
    y, new = np.array([value for _, value in points]), math.log(12 * 12 * 768**2)
    slope, intercept = np.polyfit(x, y, 1)
    deviation = math.sqrt(((y - slope * x - intercept) ** 2).sum() / (len(x) - 2))
    spread = math.sqrt(1 / len(x) + (new - x.mean()) ** 2 / ((x - x.mean()) ** 2).sum())
    return slope * new + intercept, t.ppf(0.975, len(x) - 2) * deviation * spread


# How rows are computed from a raw file. All other files have printed tables, of which RESULTS.md shows some cells.
COMPUTED: dict[str, Callable[[str], Iterator[Row]]] = {"optimizers.jsonl": optimizers}


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.partition("\n")[0])
def test_tables_agree_with_the_raw_file_before_them(section: str) -> None:
    raw, computed = None, []
    for table, name in TABLE.findall(section):
        if name:
            text = (ROOT / "benchmarks" / "results" / name).read_text(encoding="utf-8")
            raw = list(COMPUTED.get(name, printed)(text))
            computed += raw if name in COMPUTED else []
        elif not section.startswith("On an H100"):  # measured from outside
            assert raw, "no raw file is named before the table"
            for row in printed(table):
                same = [other for other in raw if row.items() <= other.items()]
                assert same, row
                computed = [other for other in computed if other not in same]
    assert not computed, "rows are missing"

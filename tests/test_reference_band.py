"""The losses of published llm.c runs are in the range of a reproduction.

The loss of OpenAI's GPT-2 is above the range.
"""

import csv
import itertools
from pathlib import Path

import pytest

from gpt2_repro.evaluation.references import CURVES, band, verdict


BY = ("8xH100_modded-nanogpt", "8xA100_SiddanthEmani", "1xA100-40GB_HectorFCardenas")
RUNS = {"llm.c": [f"124M_fineweb10B_{by}" for by in BY], "llm.c 350M": ["350M_fineweb_modded-nanogpt_track2"]}


def losses(folder: Path, run: str) -> dict[int, float]:
    with (folder / "reference_curves" / f"llmc_{run}.csv").open(encoding="utf-8") as lines:
        return {int(row["step"]): float(row["val_loss"]) for row in csv.DictReader(lines) if row["val_loss"]}


@pytest.mark.parametrize("name", CURVES)
def test_the_curves_are_the_published_runs(name: str, real_data: Path) -> None:
    published, curve = [losses(real_data, run) for run in RUNS[name]], CURVES[name].losses
    for step, (low, high) in curve.items():
        found = [run[step] for run in published]
        assert (low, high) == (pytest.approx(min(found), abs=1e-4), pytest.approx(max(found), abs=1e-4))
    for run in published:
        inside = {step for step, loss in run.items() if verdict(name, step, loss) == "inside"}
        assert inside == {step for step in run if min(curve) <= step <= max(curve)}


@pytest.mark.parametrize(("name", "last", "gpt2"), [("llm.c", 19_500, 3.4250), ("llm.c 350M", 60_000, 3.0831)])
def test_the_band_tells_gpt2_from_a_reproduction(name: str, last: int, gpt2: float) -> None:
    highest = [band(name, step)[1] for step in CURVES[name].losses]
    assert all(later < earlier for earlier, later in itertools.pairwise(highest))
    assert verdict(name, last, gpt2) == verdict(name, 1000, float("nan")) == "above"
    assert verdict(None, 1000, 4.33) is verdict(name, 249, 6.0) is None

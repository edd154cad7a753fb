"""The losses of three published llm.c runs are in the range of a reproduction.

The loss of OpenAI's GPT-2 is above the range.
"""

import csv
import itertools
from pathlib import Path

import pytest

from gpt2_repro.evaluation.references import ANCHORS, band, verdict


RUNS = ("8xH100_modded-nanogpt", "8xA100_SiddanthEmani", "1xA100-40GB_HectorFCardenas")


def losses(folder: Path, run: str) -> dict[int, float]:
    with (folder / "reference_curves" / f"llmc_124M_fineweb10B_{run}.csv").open(encoding="utf-8") as lines:
        return {int(row["step"]): float(row["val_loss"]) for row in csv.DictReader(lines) if row["val_loss"]}


def test_the_anchors_are_the_published_runs(real_data: Path) -> None:
    curves = [losses(real_data, run) for run in RUNS]
    for step, (low, high) in ANCHORS.items():
        published = [curve[step] for curve in curves]
        assert (low, high) == (pytest.approx(min(published), abs=1e-4), pytest.approx(max(published), abs=1e-4))
    for curve in curves:
        inside = {step for step, loss in curve.items() if verdict(step, loss) == "inside"}
        assert inside == {step for step in curve if 250 <= step <= 19_500}


def test_the_band_tells_gpt2_from_a_reproduction() -> None:
    assert all(later < earlier for earlier, later in itertools.pairwise([band(step)[1] for step in ANCHORS]))
    assert verdict(19_500, 3.4250) == verdict(1000, float("nan")) == "above"

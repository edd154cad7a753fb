"""Benchmark scripts start, and that of training steps measures this project's own Trainer."""

import subprocess
import sys

import pytest

from benchmarks.processes import ROOT
from benchmarks.stopwatch import Stopwatch
from benchmarks.train_step import CONTENDERS, Setup


@pytest.mark.parametrize("name", ["trainer", "masked", "bare"])
def test_the_windows_of_a_contender_are_timed(name: str) -> None:
    size = {"micro_batch": 2, "accumulation": 1, "warmup": 1, "steps": 1, "windows": 2}
    setup = Setup("shakespeare", **size, compile=False, bf16=False)
    watch = Stopwatch(setup)
    CONTENDERS[name](setup, watch)
    assert len(watch.seconds) == setup.windows and min(watch.seconds) > 0


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks").glob("*.py")), ids=lambda path: path.stem)
def test_a_script_has_a_help_text(path) -> None:
    if "ArgumentParser(" in path.read_text(encoding="utf-8"):
        words = [sys.executable, "-m", f"benchmarks.{path.stem}", "--help"]
        subprocess.run(words, cwd=ROOT, check=True, timeout=120)

"""Benchmark scripts start from a checkout that is not installed."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.processes import ROOT


PATHS = sorted((ROOT / "benchmarks").glob("*.py"))
SCRIPTS = [path for path in PATHS if "ArgumentParser(" in path.read_text(encoding="utf-8")]


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_script_starts_as_its_docstring_says(script: Path) -> None:
    module = ["-m", f"benchmarks.{script.stem}"]
    start = module if " ".join(module) in script.read_text(encoding="utf-8") else [str(script)]
    done = subprocess.run([sys.executable, *start, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "usage:" in done.stdout, done.stderr

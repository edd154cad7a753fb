"""The benchmark runs as typed, and what it prints is what it measured."""

import json
from pathlib import Path

import pytest


@pytest.mark.slow
def test_two_contenders_in_one_table(type_command, tmp_path: Path) -> None:
    short = ("--warmup", 1, "--steps", 2, "--windows", 2, "--rounds", 1, "--out", tmp_path / "out.json")
    done = type_command("python", "benchmarks/train_step.py", *short, "--only", "trainer", "bare", "--no-compile")
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads((tmp_path / "out.json").read_text())["results"]
    lines = [line for line in done.stdout.splitlines() if line.startswith("|")][2:]
    for line, (name, (measured,)) in zip(lines, results.items(), strict=True):
        assert name in ("trainer", "bare") and len(measured["seconds"]) == 2 and measured["waits"] == 0
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert int(cells[2].replace(",", "")) == round(12 * 64 / measured["median"])
    assert "MFU" in done.stdout and str(tmp_path) in done.stdout  # the command is on record

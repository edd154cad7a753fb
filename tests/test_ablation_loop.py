"""The loop over settings and seeds in docs/ablations.md runs as printed, also after a kill."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gpt2_repro.run_record import RunRecord
from tests.commands import ROOT


NAMES = sorted(f"{setting}-{seed}" for setting in ("adamw", "muon") for seed in (42, 43, 44))


def printed_loop(recipe: Path) -> str:
    """Return the commands of the page, with another recipe."""
    page = (ROOT / "docs" / "ablations.md").read_text(encoding="utf-8")
    section = page.partition("## Settings times seeds\n")[2]
    block = re.search(r"```bash\n(.*?)```", section, re.DOTALL)
    assert block is not None and block[1].count("recipes/demo.yaml") == 2
    return block[1].replace("recipes/demo.yaml", str(recipe))


def start(folder: Path, script: Path) -> subprocess.Popen:
    environment = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT))
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    with (folder / "output.txt").open("w") as output:
        return subprocess.Popen(
            ["bash", script.name], cwd=folder, env=environment, stdout=output, stderr=output, start_new_session=True
        )


@pytest.mark.slow
def test_the_loop_trains_all_runs_and_can_be_killed(tiny_recipe: Path, tmp_path: Path) -> None:
    for name in ("train.py", "prepare_data.py"):
        (tmp_path / name).symlink_to(ROOT / name)
    script = tmp_path / "ablation.sh"
    script.write_text(printed_loop(tiny_recipe), encoding="utf-8")
    runs = tmp_path / "runs" / "ablation"

    loop = start(tmp_path, script)
    killed = runs / "adamw-42"  # the second run
    deadline = time.monotonic() + 300
    while not list(killed.glob("checkpoint-*/manifest.json")) and time.monotonic() < deadline:
        assert loop.poll() is None, (tmp_path / "output.txt").read_text(encoding="utf-8")[-2000:]
        time.sleep(0.05)
    os.killpg(loop.pid, signal.SIGKILL)
    loop.wait()
    finished = (runs / "muon-42" / "final" / "model.safetensors").stat().st_mtime_ns
    assert sorted(path.name for path in runs.iterdir()) == ["adamw-42", "muon-42"]

    again = start(tmp_path, script)
    assert again.wait(600) == 0, (tmp_path / "output.txt").read_text(encoding="utf-8")[-2000:]
    assert sorted(path.name for path in runs.iterdir()) == NAMES
    for path in runs.iterdir():
        assert RunRecord(path).status().state == "complete"
    assert (runs / "muon-42" / "final" / "model.safetensors").stat().st_mtime_ns == finished
    assert "<img" in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert r"\begin{tabular}" in (tmp_path / "report.tex").read_text(encoding="utf-8")
    assert (tmp_path / "report" / "loss.svg").is_file()
    table = (tmp_path / "output.txt").read_text(encoding="utf-8").splitlines()[-4:-1]
    assert [line.split()[1] for line in table[1:]] == ["3", "3"], table

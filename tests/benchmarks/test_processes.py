"""A benchmark that takes too long leaves no processes running."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from benchmarks.processes import ROOT, run_captured


def test_descendants_are_killed_after_a_timeout(tmp_path: Path) -> None:
    # A launcher starts its workers in sessions of their own.
    started = tmp_path / "pid"
    code = "import pathlib, subprocess, time; worker = subprocess.Popen(['sleep', '60'], start_new_session=True); "
    code += f"pathlib.Path({str(started)!r}).write_text(str(worker.pid)); time.sleep(60)"
    with pytest.raises(subprocess.TimeoutExpired):
        run_captured([sys.executable, "-c", code], timeout=5)
    pid = int(started.read_text(encoding="utf-8"))
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    assert run_captured([sys.executable, "-c", "print(7)"], timeout=60).stdout == "7\n"


SCRIPTS = [
    path for path in (ROOT / "benchmarks").glob("*.py") if "ArgumentParser(" in path.read_text(encoding="utf-8")
]


@pytest.mark.slow
@pytest.mark.parametrize("script", sorted(SCRIPTS), ids=lambda script: script.stem)
def test_a_script_starts_as_its_docstring_says(script: Path) -> None:
    """Each script with options prints its help, from a checkout that is not installed."""
    done = subprocess.run([sys.executable, script, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "usage:" in done.stdout, done.stderr

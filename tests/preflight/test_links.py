"""`preflight --dist` detects all-reduces that fail or hang."""

import subprocess
import sys
from pathlib import Path

import pytest

from gpt2_repro.planning.memory import MemoryTrial, trials_of
from gpt2_repro.preflight.environment import try_training
from gpt2_repro.preflight.links import check_all_reduce
from tests.sections import ROOT


# Rank 1 joins the process group and then never takes part in the all-reduce.
ABSENT = """
if os.environ["RANK"] == "1":
    dist.init_process_group("gloo")
    time.sleep(600)
"""
WRONG = """
reduce = dist.all_reduce
dist.all_reduce = lambda numbers: (reduce(numbers), numbers[5].add_(1))
"""
WORKER = "import os, time\nimport torch.distributed as dist\nfrom gpt2_repro.preflight import links\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "seconds", "message"), [(ABSENT, 3, "within 3 s"), (WRONG, 120, "wrong sums on rank")]
)
def test_faulty_links_end_the_processes(
    fault: str, seconds: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    script = tmp_path / "worker.py"
    script.write_text(f"{WORKER}{fault}\nlinks.measure({seconds})\n", encoding="utf-8")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run([*launcher, str(script)], capture_output=True, text=True, timeout=180)
    assert done.returncode != 0 and message in done.stdout and "GB/s" not in done.stdout


@pytest.mark.slow
def test_two_processes_that_communicate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    finding = check_all_reduce(2, seconds=120)
    assert finding.mark == "✓" and "GB/s" in finding.text


def test_memory_settings_divide_the_step() -> None:
    assert [trial.micro_batch for trial in trials_of(MemoryTrial(48, True), 512)] == [32, 16, 8, 4, 2, 1]
    assert [trial.checkpointing for trial in trials_of(MemoryTrial(2), 30)] == [False, False, True, True]


def test_out_of_memory_is_not_another_failure() -> None:
    (trial,) = trials_of(MemoryTrial(1, True), 1)
    assert try_training([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"], trial) is None
    failed = try_training([sys.executable, "-c", "raise ValueError('no such data')"], trial)
    assert failed is not None and failed.mark == "✗" and "no such data" in failed.text

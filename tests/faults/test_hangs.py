"""If a rank hangs, the run ends and prints the stack traces of all ranks."""

import re
from pathlib import Path

import pytest

from tests.faults.runs import weights


pytestmark = pytest.mark.faults


def test_a_rank_that_is_stuck_ends_the_run_with_every_ranks_stack(train, fault, golden, tmp_path: Path) -> None:
    """If a rank hangs, --hang_timeout ends the run, and the same command resumes it."""
    run, options = tmp_path / "run", ("--save_steps", 2, "--per_device_train_batch_size", 4)
    words = (*options, "--hang_timeout", 20)
    code, text = fault("hang", 5, run, *words, rank=1, launcher=("launch", 2))
    assert code != 0
    assert text.count("Timeout (0:00:20)!") == 2, text
    assert "faulty_train.py" in text.split("Timeout (0:00:20)!", 1)[1]  # the stack names the line that hangs
    assert (run / "checkpoint-4" / "manifest.json").is_file()
    train(run, *options, launcher=("launch", 2))
    assert weights(run) == weights(golden(*options, launcher=("launch", 2)))


def test_a_slow_save_is_not_a_hang(fault, golden, tmp_path: Path) -> None:
    """A save that takes longer than --hang_timeout is completed."""
    run, options = tmp_path / "run", ("--save_steps", 4, "--per_device_train_batch_size", 4)
    code, text = fault("slow_disk", 4, run, *options, "--hang_timeout", 10)
    assert code == 0, text
    slowest = max(float(seconds) for seconds in re.findall(r"MB in ([\d.]+) s, training paused", text))
    assert slowest > 15 and weights(run) == weights(golden(*options))


def test_a_stuck_save_ends_the_run_with_its_stack(start, tmp_path: Path) -> None:
    options = ("--save_steps", 4, "--per_device_train_batch_size", 4, "--hang_timeout", 10)
    command = start(tmp_path / "run", *options, fault=("stuck_disk", 4, 0))
    assert command.end() != 0
    assert "Timeout (0:00:10)!" in command.text() and "saving.py" in command.text()

"""If a rank hangs, the run ends and prints the stack traces of all ranks."""

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

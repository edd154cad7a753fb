"""RS: other numbers of processes, damaged files, finished runs, and runs that are to go further or back."""

import json
from pathlib import Path

import pytest

from tests.faults.runs import losses, status, weights


pytestmark = pytest.mark.faults


@pytest.mark.parametrize("bf16", ["true", "false"], ids=["bf16", "fp32"])
def test_two_processes_then_one_then_two_are_the_straight_run(train, bf16: str, tmp_path: Path) -> None:
    """RS2, P3: through DeepSpeed's universal checkpoint, by the same command and another --num_processes."""
    options = ("--max_steps", 12, "--per_device_train_batch_size", 2, "--bf16", bf16, "--learning_rate", 1e-3)
    straight = train(tmp_path / "straight", *options, launcher=("launch", 2))
    run = tmp_path / "run"
    for processes, stop in ((2, 4), (1, 8), (2, 12)):
        train(run, *options, "--stop_at_step", stop, launcher=("launch", processes))
        assert json.loads((run / "environment.json").read_text())["plan"]["num_processes"] == processes
    assert status(run)["state"] == "complete"
    ours, theirs = losses(run), losses(straight)
    assert [loss[:2] for loss in ours] == [loss[:2] for loss in theirs]
    assert [loss[2] for loss in ours] == pytest.approx([loss[2] for loss in theirs], abs=1e-4)


def test_without_deepspeed_too(train, tmp_path: Path) -> None:
    """RS2 with torchrun's DDP and with one process, whose checkpoints have one form."""
    options = ("--max_steps", 9, "--per_device_train_batch_size", 2, "--save_steps", 100)
    straight, run = train(tmp_path / "straight", *options), tmp_path / "run"
    for launcher, stop in ((("torchrun", 2), 3), (("python",), 6), (("torchrun", 2), 9)):
        train(run, *options, "--stop_at_step", stop, launcher=launcher)
    assert [loss[2] for loss in losses(run)] == pytest.approx([loss[2] for loss in losses(straight)], abs=1e-4)


@pytest.mark.parametrize("lost", ["optimizer.pt", "rng_state.pth", "scheduler.pt", "trainer_state.json"])
def test_a_checkpoint_without_a_file_is_passed_over(
    train, type_command, tiny_recipe, lost: str, tmp_path: Path
) -> None:
    """RS5, RS6."""
    run = train(tmp_path / "run", "--save_steps", 2, "--stop_at_step", 4, "--keep_checkpoints", 0)
    (run / "checkpoint-4" / lost).unlink()
    done = type_command("python", "train.py", tiny_recipe, "--output_dir", run, "--save_steps", 2)
    assert done.returncode == 0, done.stderr
    assert f"skipping {run}/checkpoint-4: {lost} is missing" in done.stdout
    assert f"resuming from {run}/checkpoint-2" in done.stdout
    assert weights(run) == weights(train(tmp_path / "golden"))

"""RS: other numbers of processes, damaged files, finished runs, and runs that are to go further or back."""

import json
from pathlib import Path

import pytest

from tests.faults.runs import losses, status, weights


pytestmark = pytest.mark.faults


@pytest.mark.parametrize(
    ("launcher", "bf16", "stops"),
    [
        ("launch", "true", ((2, 4), (1, 8), (2, 12))),
        ("launch", "false", ((2, 6), (1, 12))),
        ("zero3", "false", ((2, 4), (1, 8), (4, 12))),
    ],
    ids=["bf16", "fp32", "zero3"],
)
def test_on_other_numbers_of_processes_a_run_is_the_straight_one(
    launcher: str, bf16: str, stops, train, golden, tmp_path: Path
) -> None:
    """RS2, P3: through DeepSpeed's universal checkpoint, by the same command and another --num_processes."""
    options = ("--max_steps", 12, "--per_device_train_batch_size", 2, "--bf16", bf16, "--learning_rate", 1e-3)
    straight, run = golden(*options, launcher=(launcher, 2)), tmp_path / "run"
    for processes, stop in stops:
        train(run, *options, "--stop_at_step", stop, launcher=(launcher, processes))
        assert json.loads((run / "environment.json").read_text())["plan"]["num_processes"] == processes
    assert status(run)["state"] == "complete"
    ours, theirs = ({loss[:2]: loss[2] for loss in losses(folder)} for folder in (run, straight))
    # Where it stopped it validated too.
    assert ours.keys() - theirs.keys() <= {(stop, "eval_loss") for _, stop in stops}
    assert {key: ours[key] for key in theirs} == pytest.approx(theirs, abs=1e-4)


@pytest.mark.parametrize("launcher", ["zero2", "zero3", "fsdp2"])
def test_whatever_is_sharded_a_resumed_run_is_the_straight_one(launcher: str, train, golden, tmp_path: Path) -> None:
    options = ("--bf16", "true", "--per_device_train_batch_size", 4, "--dropout", 0.1)
    straight, run = golden(*options, launcher=(launcher, 2)), tmp_path / "run"
    train(run, *options, "--stop_at_step", 3, launcher=(launcher, 2))
    train(run, *options, launcher=(launcher, 2))
    assert status(run)["state"] == "complete" and weights(run) == weights(straight)


def test_without_deepspeed_too(train, golden, tmp_path: Path) -> None:
    """RS2 with torchrun's DDP and with one process, whose checkpoints have one form."""
    straight, run = golden("--per_device_train_batch_size", 4), tmp_path / "run"
    for launcher, stop in ((("torchrun", 2), 3), (("python",), 6), (("torchrun", 2), 8)):
        train(run, "--per_device_train_batch_size", 2, "--stop_at_step", stop, launcher=launcher)
    ours = {(step, kind): loss for step, kind, loss in losses(run)}
    for step, kind, loss in losses(straight):
        assert ours[step, kind] == pytest.approx(loss, abs=1e-4)


def test_under_fsdp_two_processes_then_four_are_the_straight_run(train, golden, tmp_path: Path) -> None:
    """RS2: its checkpoints are whole."""
    straight, run = golden("--per_device_train_batch_size", 4), tmp_path / "run"
    for processes, stop in ((2, 3), (4, 8)):
        options = ("--per_device_train_batch_size", 2, "--stop_at_step", stop)
        train(run, *options, launcher=("fsdp2", processes))
    ours = {(step, kind): loss for step, kind, loss in losses(run)}
    for step, kind, loss in losses(straight):
        assert ours[step, kind] == pytest.approx(loss, abs=1e-4)


@pytest.mark.parametrize("launcher", [("launch", 2), ("zero3", 2)], ids=["zero1", "zero3"])
def test_a_change_that_is_allowed_takes_effect(launcher: tuple, train, tmp_path: Path) -> None:
    """DeepSpeed restored the clipping limit of the checkpoint and ignored the recipe's."""
    options, runs = ("--per_device_train_batch_size", 4), []
    for name, its in (("one", ("python",)), ("many", launcher)):
        train(tmp_path / name, *options, "--stop_at_step", 4, launcher=its)
        changed = ("--max_grad_norm", 0.1, "--allow_resume_change")
        runs.append({loss[:2]: loss[2] for loss in losses(train(tmp_path / name, *options, *changed, launcher=its))})
    assert runs[0] == pytest.approx(runs[1], abs=1e-4)


@pytest.mark.parametrize("lost", ["optimizer.pt", "rng_state.pth"])
def test_a_checkpoint_without_a_file_is_passed_over(
    train, golden, type_warm, tiny_recipe, lost: str, tmp_path: Path
) -> None:
    """RS5, RS6: what transformers would pass over in silence."""
    options = ("--per_device_train_batch_size", 4)
    run = train(tmp_path / "run", *options, "--save_steps", 2, "--stop_at_step", 4, "--keep_checkpoints", 0)
    (run / "checkpoint-4" / lost).unlink()
    done = type_warm("python", "train.py", tiny_recipe, "--output_dir", run, *options)
    assert done.returncode == 0, done.stderr
    assert f"skipping {run}/checkpoint-4: {lost} is missing" in done.stdout
    assert f"resuming from {run}/checkpoint-2" in done.stdout
    assert weights(run) == weights(golden(*options))

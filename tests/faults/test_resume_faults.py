"""A run can resume with another number of processes or with a changed option."""

import json

import pytest
import torch
from safetensors.torch import load_file

from tests.faults.runs import losses, status
from tests.optim.simulation import require_mean


pytestmark = pytest.mark.faults


@pytest.mark.parametrize(
    ("launchers", "bf16"),
    [
        ((("launch", 2), ("launch", 1), ("launch", 2)), "true"),
        ((("launch", 2), ("launch", 1)), "false"),
        ((("zero3", 2), ("zero3", 1), ("zero3", 4)), "false"),
        ((("torchrun", 2), ("python",), ("torchrun", 2)), "false"),
        ((("fsdp2", 2), ("fsdp2", 4)), "false"),
    ],
    ids=["zero1-bf16", "zero1-fp32", "zero3", "ddp", "fsdp2"],
)
def test_another_number_of_processes_gives_equal_losses(launchers, bf16: str, train, golden, run) -> None:
    """Resuming with another number of processes gives the same losses."""
    options = ("--max_steps", 12, "--per_device_train_batch_size", 2, "--bf16", bf16, "--learning_rate", 1e-3)
    straight = golden(*options, launcher=launchers[0])
    stops = [12 * number // len(launchers) for number in range(1, len(launchers) + 1)]
    for launcher, stop in zip(launchers, stops, strict=True):
        train(run, *options, "--stop_at_step", stop, launcher=launcher)
        plan = json.loads((run / "environment.json").read_text(encoding="utf-8"))["plan"]
        assert plan["num_processes"] == (1 if launcher == ("python",) else launcher[1])
    assert status(run)["state"] == "complete"
    ours, theirs = ({loss[:2]: loss[2] for loss in losses(folder)} for folder in (run, straight))
    # A stopped run also validates at its last step.
    assert ours.keys() - theirs.keys() <= {(stop, "eval_loss") for stop in stops}
    assert {key: ours[key] for key in theirs} == pytest.approx(theirs, abs=1e-4)


@pytest.mark.parametrize("launchers", [(1, 2), (2, 3), (3, 1)], ids=str)
@pytest.mark.parametrize(("launcher", "bf16"), [("launch", "false"), ("launch", "true"), ("zero2", "false")])
def test_the_average_survives_another_number_of_processes(launcher, bf16, launchers, train, tmp_path, run) -> None:
    """The averaged weights are those of a run that was not interrupted."""
    rows = ("--tokens_per_step", 12 * 32, "--per_device_train_batch_size", 2)
    options = (*rows, "--ema_steps", 20, "--save_steps", 1, "--keep_checkpoints", 0, "--bf16", bf16)
    straight = train(tmp_path / "straight", *options, launcher=(launcher, launchers[0]))
    train(run, *options, "--stop_at_step", 4, launcher=(launcher, launchers[0]))
    train(run, *options, launcher=(launcher, launchers[1]))
    # A checkpoint of bf16 has rounded weights.
    require_mean(run, steps=8, tolerance=1e-6 if bf16 == "false" else 8e-3)
    weights = load_file(run / "final" / "model.safetensors")
    expected = load_file(straight / "final" / "model.safetensors")
    # Adam moves a weight with a tiny gradient by the sign of the gradient, which bf16 on other processes can change.
    tolerance = 1e-4 if bf16 == "false" else 5e-3
    for name, weight in weights.items():
        torch.testing.assert_close(weight, expected[name], atol=tolerance, rtol=1e-5)


@pytest.mark.parametrize("launcher", [("launch", 2), ("zero3", 2)], ids=["zero1", "zero3"])
def test_a_change_that_is_allowed_takes_effect(launcher: tuple, train, tmp_path) -> None:
    """A new --max_grad_norm takes effect on resume, also under DeepSpeed."""
    # DeepSpeed alone would restore the old value from the checkpoint.
    options, runs = ("--per_device_train_batch_size", 4), []
    for name, its in (("one", ("python",)), ("many", launcher)):
        train(tmp_path / name, *options, "--stop_at_step", 4, launcher=its)
        changed = ("--max_grad_norm", 0.1, "--allow_resume_change")
        runs.append({loss[:2]: loss[2] for loss in losses(train(tmp_path / name, *options, *changed, launcher=its))})
    assert runs[0] == pytest.approx(runs[1], abs=1e-4)

"""Updates with NaN or infinity are skipped; five skips in a row end the run."""

import math

import pytest
import torch
from safetensors.torch import load_file

from gpt2_repro.optim.schedule import learning_rate_factor
from gpt2_repro.report.read import Run
from tests.faults.runs import status


pytestmark = pytest.mark.faults

SAVES = ("--save_steps", 1, "--keep_checkpoints", 0, "--per_device_train_batch_size", 4)
ENGINES = [(("python",), "false"), (("torchrun", 2), "true"), (("launch", 2), "true"), (("launch", 2), "false")]


@pytest.mark.parametrize(("launcher", "bf16"), ENGINES, ids=str)
def test_one_update_of_nan_is_skipped_and_seen(fault, events, launcher, bf16: str, run) -> None:
    """If the loss of one rank is NaN, all ranks skip the update and log the skip."""
    rank = 0 if launcher == ("python",) else 1
    code, text = fault("nan", 3, run, *SAVES, "--bf16", bf16, rank=rank, launcher=launcher)
    assert code == 0, text
    weights = [load_file(run / f"checkpoint-{step}" / "model.safetensors") for step in (2, 3, 4)]
    assert all(torch.equal(weight, weights[1][name]) for name, weight in weights[0].items())
    assert not all(torch.equal(weight, weights[2][name]) for name, weight in weights[1].items())
    logged = {event["step"]: event for event in events(run) if "loss" in event}
    assert logged[3]["loss"] is None and logged[3]["grad_norm"] is None
    assert all(math.isfinite(logged[step]["loss"]) for step in (1, 2, 4, 5, 6, 7, 8))
    assert "updates_skipped" not in logged[2] and logged[8]["updates_skipped"] == 1
    (skipped,) = [event for event in events(run) if "update_skipped" in event]
    assert skipped["step"] == 3 and skipped["update_skipped"].startswith("gradient norm")
    # The learning rate depends on the step only: a skipped update does not delay the schedule.
    rates = [learning_rate_factor(step, warmup_steps=3, max_steps=8) * 1e-2 for step in range(8)]
    assert [logged[step]["learning_rate"] for step in range(1, 9)] == pytest.approx(rates)
    final = load_file(run / "final" / "model.safetensors")
    assert all(weight.isfinite().all() for weight in final.values())
    assert Run(run).non_finite_steps == [3]


def test_a_resume_goes_on_with_nan(fault, train, events, run) -> None:
    """The losses of a log line span a checkpoint, and are null after a resume too."""
    options = (*SAVES, "--logging_steps", 4)
    code, text = fault("nan", 3, run, *options)
    assert code == 0, text
    before = [(event["step"], event["loss"]) for event in events(run) if "loss" in event]
    assert [step for step, loss in before if loss is None] == [4]
    train(run, *options, "--resume_from", "checkpoint-3")
    assert [(event["step"], event["loss"]) for event in events(run) if "loss" in event] == before


@pytest.mark.parametrize(("launcher", "bf16"), [ENGINES[0], ENGINES[2]], ids=str)
def test_five_in_a_row_end_the_run(fault, launcher, bf16: str, run, tmp_path) -> None:
    """Five skipped updates in a row end the run with the state `diverged`."""
    place = tmp_path / "place"
    code, text = fault("nan", "3-8", run, *SAVES, "--bf16", bf16, "--sync_to", place, launcher=launcher)
    assert code == 1, text
    assert status(place) == status(run) and (place / "checkpoint-6" / "manifest.json").is_file()
    assert len({line for line in text.splitlines() if line.startswith("error: ")}) == 1
    recorded = status(run)
    assert recorded["state"] == "diverged" and "5 times in a row, last in step 7" in recorded["reason"]
    good = load_file(run / "checkpoint-2" / "model.safetensors")
    last = load_file(run / "checkpoint-6" / "model.safetensors")
    assert all(torch.equal(weight, last[name]) for name, weight in good.items())
    assert not (run / "final").exists()

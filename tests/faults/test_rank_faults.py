"""A run ends if the weights of one rank differ from those of the other ranks."""

import re
from pathlib import Path

import pytest

from tests.faults.runs import losses, status, weights


pytestmark = pytest.mark.faults

OPTIONS = ("--save_steps", 2, "--per_device_train_batch_size", 4)


# Under ZeRO, the bit is flipped at step 4, where weights are compared. ZeRO would repair a weight flipped earlier,
# because it gathers the weights again in every step.
@pytest.mark.parametrize(("launcher", "at"), [(("launch", 2), 4), (("torchrun", 2), 3)], ids=["zero1", "ddp"])
def test_a_flipped_bit_on_one_rank_ends_the_run_before_it_is_validated_or_saved(
    train, fault, golden, launcher, at: int, tmp_path: Path
) -> None:
    """A flipped bit in one rank's weights ends the run before the weights are saved."""
    run = tmp_path / "run"
    code, text = fault("flipped_bit", at, run, *OPTIONS, rank=1, launcher=launcher)
    assert code == 1 and re.search("step 4 .*rank 1 .*transformer.wte.weight", text)
    assert {path.name for path in run.glob("checkpoint-*")} == {"checkpoint-2"}
    assert status(run)["state"] == "failed" and max(step for step, kind, _ in losses(run) if kind == "eval_loss") == 0
    train(run, *OPTIONS, launcher=launcher)
    straight = golden(*OPTIONS, launcher=launcher)
    assert weights(run) == weights(straight) and losses(run) == losses(straight)

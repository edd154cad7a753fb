"""A run ends if a rank hangs, or has other weights than the other ranks."""

import re
import time

import pytest

from tests.faults.runs import losses, results, status, weights


pytestmark = pytest.mark.faults

EVERY_2, EVERY_4 = (("--save_steps", steps, "--per_device_train_batch_size", 4) for steps in (2, 4))


def test_a_rank_that_is_stuck_ends_the_run_with_every_ranks_stack(fault, resumes_exactly, run) -> None:
    """If a rank hangs, --hang_timeout ends the run, and the same command resumes it."""
    launcher = ("launch", 2)
    code, text = fault("hang", 5, run, *EVERY_2, "--hang_timeout", 10, rank=1, launcher=launcher)
    assert code != 0
    assert text.count("Timeout (0:00:10)!") == 2, text
    assert "faulty_train.py" in text.split("Timeout (0:00:10)!", 1)[1]  # the stack names the line that hangs
    assert (run / "checkpoint-4" / "manifest.json").is_file()
    resumes_exactly(run, *EVERY_2, launcher=launcher)


def test_a_run_that_was_stopped_for_long_continues(start, golden, run) -> None:
    """For example, by Slurm, or with its container. All processes of the run are stopped."""
    options = (*EVERY_4, "--max_steps", 400, "--save_steps", 100)
    command = start(run, *options, "--hang_timeout", 4, launcher=("launch", 2), warm=True)
    command.wait_until(lambda: command.step() > 10)
    processes = list(command.ranks().values())
    for process in processes:
        process.suspend()
    time.sleep(8)
    step = command.step()
    for process in processes:
        process.resume()
    assert step < 400 and command.end() == 0, command.text()
    assert results(run) == results(golden(*options, launcher=("launch", 2)))


def test_a_slow_save_is_not_a_hang(fault, golden, run) -> None:
    """A save that takes longer than --hang_timeout is completed."""
    short = (*EVERY_4, "--max_steps", 4)  # one save
    code, text = fault("slow_disk", 4, run, *short, "--hang_timeout", 10)
    assert code == 0, text
    slowest = max(float(seconds) for seconds in re.findall(r"MB in ([\d.]+) s, training paused", text))
    assert slowest > 15 and weights(run) == weights(golden(*short))


def test_a_slow_save_of_rank_0_is_not_a_hang_of_rank_1(fault, golden, run) -> None:
    """Rank 1 waits before the second save, until rank 0 has written the first one."""
    launcher = ("launch", 2)
    code, text = fault("slow_disk", 4, run, *EVERY_4, "--hang_timeout", 13, launcher=launcher)
    assert code == 0, text
    assert weights(run) == weights(golden(*EVERY_4, launcher=launcher))


def test_a_stuck_save_ends_the_run_with_its_stack(start, run) -> None:
    command = start(run, *EVERY_4, "--hang_timeout", 10, fault=("stuck_disk", 4, 0))
    assert command.end() != 0
    assert "Timeout (0:00:10)!" in command.text() and "saving.py" in command.text()


# Under ZeRO, the bit is flipped at step 4, where weights are compared. ZeRO would repair a weight flipped earlier,
# because it gathers the weights again in every step.
@pytest.mark.parametrize(("launcher", "at"), [(("launch", 2), 4), (("torchrun", 2), 3)], ids=["zero1", "ddp"])
def test_a_flipped_bit_on_one_rank_is_not_saved(fault, resumes_exactly, launcher, at: int, run) -> None:
    """A flipped bit in one rank's weights ends the run before the weights are saved."""
    code, text = fault("flipped_bit", at, run, *EVERY_2, rank=1, launcher=launcher)
    assert code == 1 and re.search("step 4 .*rank 1 .*transformer.wte.weight", text)
    assert {path.name for path in run.glob("checkpoint-*")} == {"checkpoint-2"}
    assert status(run)["state"] == "failed" and max(step for step, kind, _ in losses(run) if kind == "eval_loss") == 0
    resumes_exactly(run, *EVERY_2, launcher=launcher)

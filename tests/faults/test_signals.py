"""Runs that a signal stops or kills can be resumed without a change of results."""

import signal
import time

import psutil
import pytest

from tests.faults.runs import losses, results, status, weights


pytestmark = pytest.mark.faults

LONG = ("--max_steps", 300, "--save_steps", 1000, "--eval_steps", 50, "--per_device_train_batch_size", 4)
READERS = ("--dataloader_num_workers", 1)  # a worker, which also gets the signals sent to a launcher


# Rank that receives the signal (None: the launcher), the signal, and the reason in run_status.json.
SIGNALS = {
    "SIGTERM to rank 1": (1, signal.SIGTERM, "SIGTERM"),
    "SIGUSR1 to rank 0": (0, signal.SIGUSR1, "SIGUSR1"),
    "SIGUSR2 to rank 1": (1, signal.SIGUSR2, "SIGUSR2"),
    "SIGTERM to the launcher": (None, signal.SIGTERM, "SIGTERM"),
    "Ctrl-C in the launcher's terminal": (None, signal.SIGINT, "SIGINT"),
    "a killed launcher": (None, signal.SIGKILL, "the launcher died"),
}


def test_every_signal_stops_all_ranks_at_one_step_with_one_checkpoint(train, start, run, tmp_path) -> None:
    """Each signal stops all ranks at the same step, with one checkpoint.

    After the last resume, the run has the results of an uninterrupted run.
    """
    options = (*LONG, *READERS)
    golden = train(tmp_path / "golden", *options, launcher=("launch", 2))
    before = 0
    for name, (rank, number, reason) in SIGNALS.items():
        command = start(run, *options, launcher=("launch", 2), warm="Ctrl-C" not in name)
        command.wait_until(lambda: command.step() >= before + 20)  # noqa: B023
        workers = psutil.Process(command.process.pid).children(recursive=True)
        (command.process if rank is None else command.ranks()[rank]).send_signal(number)
        command.end()
        gone, alive = psutil.wait_procs(workers, timeout=5)
        alive = [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]  # waits for init to reap it
        assert not alive, f"{name}: {alive} still running"
        recorded = status(run)
        assert recorded["reason"] == reason and recorded["step"] > before, name
        assert recorded["state"] == ("failed" if "died" in reason else "stopped"), name
        before = recorded["step"]
        assert before < 300 and (run / f"checkpoint-{before}" / "manifest.json").is_file(), name
        assert "killed by signal" not in command.text(), name
    assert results(train(run, *options, launcher=("launch", 2))) == results(golden)


def test_workers_of_a_launcher_that_is_killed_at_once_end(start, run) -> None:
    """They end also if it is killed while they import Python's modules, before they ask for a signal at its death."""
    command = start(run, *LONG, launcher=("torchrun", 2))
    workers = command.wait_until(lambda: len(command.ranks()) == 2 and command.ranks().values())
    command.process.kill()
    _, alive = psutil.wait_procs(workers, timeout=60)
    for worker in alive:
        worker.kill()
    assert not alive, command.text()


def test_the_second_ctrl_c_ends_at_once(start, run) -> None:
    """A second Ctrl-C ends a run at once, even if a step hangs."""
    command = start(run, *LONG, fault=("hang", 3, 0))
    command.wait_until(command.mark.is_file)
    sent = 0
    while command.process.poll() is None and sent < 20:  # a busy machine may handle the first signal late
        command.process.send_signal(signal.SIGINT)
        sent += 1
        time.sleep(1.5)
    assert command.end() == 130 and sent > 1


@pytest.mark.parametrize("launcher", [("python",), ("fsdp2", 2)], ids=["one", "fsdp2"])
def test_a_validation_that_a_signal_interrupts_is_repeated(launcher, train, start, run, tmp_path) -> None:
    """After a signal during a validation, the resumed run repeats the validation."""
    options = ("--max_steps", 6, "--eval_steps", 3, "--save_steps", 100, "--per_device_eval_batch_size", 1)
    options += ("--per_device_train_batch_size", 4)
    golden = train(tmp_path / "golden", *options, launcher=launcher)
    slow = start(run, *options, "--eval_on_start", "false", launcher=launcher, fault=("slow_validation", 0, 0))
    slow.wait_until(slow.mark.is_file)
    # With sharded weights, all ranks leave the validation after the same batch.
    target = slow.ranks()[1] if launcher[0] == "fsdp2" else slow.process
    target.send_signal(signal.SIGTERM)
    assert slow.end() == 0 and status(run)["step"] == 3, slow.text()
    assert [kind for _, kind, _ in losses(run)] == ["loss"] * 3
    train(run, *options, launcher=launcher)
    assert losses(run) == losses(golden)[1:] and weights(run) == weights(golden)

"""A machine that disappears during a copy costs at most the steps since the last complete copy."""

import shutil
import signal
import sys

import psutil
import pytest

from gpt2_repro.checkpoints.place import Place
from gpt2_repro.checkpoints.rotation import newest_complete
from tests.faults.runs import fill, results, status


pytestmark = pytest.mark.faults

SAVES = ("--per_device_train_batch_size", 4, "--save_steps", 2, "--eval_steps", 2, "--keep_checkpoints", 1)
SAVES += ("--keep_best_checkpoint", "false")
OPTIONS = (*SAVES, "--max_steps", 12)


def newest_copy(place: str) -> int:
    return next((step for step, manifest in Place(place).manifests().items() if manifest), -1)


@pytest.mark.parametrize(
    ("launcher", "place"),
    [(("python",), "{}/place"), (("python",), "dir::file://{}/objects"), (("launch", 2), "{}/place")],
    ids=["one-folder", "one-objects", "zero1-folder"],
)
def test_a_machine_disappears_during_a_copy(place: str, launcher, train, fault, golden, tmp_path) -> None:
    """The processes are killed and the disk is deleted in each phase; the run continues elsewhere."""
    place = place.format(tmp_path)
    to = ("--sync_to", place)
    of_copier = ("kill_before_the_copy", "kill_in_a_file", "kill_before_the_copied_manifest")
    others = ("kill_in_the_rotation_of_copies", "kill_in_a_restored_file", "kill_before_the_restored_checkpoint")
    kills = [(name, "2-12") for name in (*of_copier, *others)]
    kills += [("kill_in_a_file", "8-12"), ("kill_before_the_copied_manifest", "10-12")]
    for number, (name, steps) in enumerate(kills[1:6] if launcher != ("python",) else kills):
        run = tmp_path / f"machine-{number}"
        before = newest_copy(place)
        code, text = fault(name, steps, run, *OPTIONS, *to, launcher=launcher)
        assert code != 0 and newest_copy(place) >= before, text
        if "restored" in name:
            assert newest_complete(run)[0] is None and before > 0
        elif before > 0:
            assert f"restored {run}/checkpoint-{before}" in text
        shutil.rmtree(run)
    assert newest_copy(place) > 0
    last = train(tmp_path / "last", *OPTIONS, *to, launcher=launcher)
    assert results(last) == results(golden(*OPTIONS, launcher=launcher))
    assert list(Place(place).manifests()) == [12]


def test_a_killed_restore_is_repeated_in_the_same_folder(train, fault, resumes_exactly, run, tmp_path) -> None:
    place = tmp_path / "place"
    train(tmp_path / "first", *OPTIONS, "--stop_at_step", 4, "--sync_to", place)
    for name in ("kill_in_a_restored_file", "kill_before_the_restored_checkpoint"):
        code, _ = fault(name, 4, run, *OPTIONS, "--sync_from", place)
        assert code != 0 and not list(run.glob("checkpoint-*"))
    train(run, *OPTIONS, "--stop_at_step", 6, "--sync_from", place)
    assert not list(run.glob(".restoring*"))
    resumes_exactly(run, *OPTIONS)


def test_a_signal_saves_first_and_waits_for_the_copy(start, run, tmp_path) -> None:
    place = tmp_path / "place"
    command = start(run, "--max_steps", 2000, *SAVES, "--sync_to", place, fault=("slow_copy", 0, 0))
    command.wait_until(lambda: command.step() > 2)
    command.process.send_signal(signal.SIGTERM)
    assert command.end() == 0, command.text()
    newest, _ = newest_complete(run)
    assert status(run)["state"] == status(place)["state"] == "stopped"
    assert newest and newest.name == f"checkpoint-{newest_copy(str(place))}"


def test_a_stuck_copy_neither_blocks_the_training_nor_survives_it(start, run, tmp_path) -> None:
    """A copy that hangs keeps only the checkpoint that it copies, and ends if the trainer is killed."""
    options = ("--max_steps", 2000, *SAVES, "--sync_to", tmp_path / "place")
    command = start(run, *options, fault=("stuck_copy", "0-2000", 0))
    command.wait_until(command.mark.is_file)
    step = command.step()
    command.wait_until(lambda: command.step() > step + 20)
    assert len(list(run.glob("checkpoint-*"))) <= 4  # newest, in flight, and one that is just published or deleted
    processes = psutil.Process(command.process.pid).children(recursive=True)
    (copier,) = (process for process in processes if "serve_copies" in " ".join(process.cmdline()))
    copier.parent().kill()
    assert not psutil.wait_procs([copier], timeout=10)[1]


def test_a_full_temporary_folder_stops_neither_copies_nor_the_supervisor(
    start, small_disk, golden, run, tmp_path
) -> None:
    """The folder is full from the start of the training on, and the supervisor restarts the run after a crash."""
    options, place = (*SAVES, "--max_steps", 40), tmp_path / "place"
    supervised = ("python", "-m", "gpt2_repro.supervise", "--wait", "0.1", "--", sys.executable)
    command = start(run, *options, "--sync_to", place, launcher=supervised, TMPDIR=str(small_disk))
    command.wait_until((run / "environment.json").is_file)
    fill(small_disk, leave=0)
    command.wait_until(lambda: command.step() > 4)
    (trainer,) = psutil.Process(command.process.pid).children()
    trainer.kill()
    assert command.end() == 0, command.text()
    assert "NOT COPIED" not in command.text() and newest_copy(str(place)) == 40
    assert results(place) == results(golden(*options))


def test_a_first_copy_that_fails_ends_all_ranks(start, run) -> None:
    """Rank 0 finds that the place cannot be written. The other ranks end with it, and not after the launcher's wait."""
    command = start(
        run, *OPTIONS, "--sync_to", "/sys/place", launcher=("launch", 2), TORCH_ELASTIC_SHUTDOWN_TIMEOUT="900"
    )
    assert command.end(timeout=120) == 1
    assert "not completely copied to /sys/place" in command.text()
    assert status(run)["state"] == "failed"

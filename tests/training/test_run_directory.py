"""The record of a run: one writer, whole files, a status that remembers."""

import datetime
import errno
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gpt2_repro.errors import UserError
from gpt2_repro.supervision import FOLDER, SINCE
from gpt2_repro.training import checkpoints
from gpt2_repro.training.meter import process_seconds
from gpt2_repro.training.run_directory import RunDirectory, describe_environment


def test_a_second_job_is_kept_out(tmp_path: Path) -> None:
    code = (
        "import sys; from gpt2_repro.training.run_directory import RunDirectory; "
        "run = RunDirectory(sys.argv[1]); run.lock(); print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with pytest.raises(UserError, match=f"is being written by process {holder.pid} on .*--output_dir"):
            RunDirectory(str(tmp_path)).lock()
        holder.communicate("")
    RunDirectory(str(tmp_path)).lock()  # the end of a process, however it came, frees the folder


def test_the_status_remembers_what_it_was_told(tmp_path: Path) -> None:
    run = RunDirectory(str(tmp_path))
    assert run.read_status() == {}
    run.write_status("running", step=5, max_steps=10)
    run.write_status("stopped", step=7)
    status = run.read_status()
    assert (status["state"], status["step"], status["max_steps"]) == ("stopped", 7, 10)
    run.write_status("complete")
    assert [path.name for path in tmp_path.iterdir()] == ["run_status.json"]
    assert not run.is_finished(10)  # without its final/ it has something left to do
    (tmp_path / "final").mkdir()
    run.write_text("final/model.safetensors", "weights")
    checkpoints.seal(tmp_path / "final", {}, step=10, environment={"trajectory": {"max_steps": 8}})
    assert run.is_finished(10) and not run.is_finished(20)  # extended, it is not at its end
    assert run.is_finished(8) and not run.is_finished(9)  # 8: the original command after an extension
    run.write_text("final/model.safetensors", "")
    assert not run.is_finished(10)
    (tmp_path / "run_status.json").write_bytes(b"\0" * 100)
    assert run.read_status() == {}


@pytest.mark.parametrize("name", ["thesis.txt", "final/thesis.txt", "staging/x", "trash-1/x", "metrics.jsonl"])
def test_a_folder_of_somebody_else_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "theirs" / name
    path.parent.mkdir(parents=True)
    path.write_text("mine")
    with pytest.raises(UserError, match="--output_dir"):
        RunDirectory(str(tmp_path / "theirs")).check_owner()
    assert path.read_text() == "mine"


def test_a_new_an_empty_or_a_run_directory_is_accepted(tmp_path: Path) -> None:
    RunDirectory(str(tmp_path / "new")).check_owner()
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / ".lock").touch()  # of a start that was killed
    RunDirectory(str(tmp_path / "empty")).check_owner()
    proofs = {
        "recipe.yaml": "training: {seed: 1}",
        "run_status.json": '{"state": "stopped"}',
        "environment.json": '{"trajectory": {"seed": 1}}',
        "checkpoint-4/manifest.json": '{"trajectory": {"seed": 1}}',
    }
    for number, (name, content) in enumerate(proofs.items()):
        run = RunDirectory(str(tmp_path / str(number)))
        for other in proofs:  # after a power cut one proof is left
            run.write_text(other, content if other == name else "")
        run.check_owner()


def test_another_run_is_refused_with_every_difference(tmp_path: Path) -> None:
    run = RunDirectory(str(tmp_path))
    run.check_trajectory({"seed": 1})
    run.write_json("environment.json", {"trajectory": {"seed": 1, "max_steps": 10, "processes": 2}})
    run.check_trajectory({"seed": 1, "max_steps": 10, "processes": 2})
    with pytest.raises(UserError, match=r"seed 1 -> 2; processes 2 -> None; new None -> 3\): .*--output_dir"):
        run.check_trajectory({"seed": 2, "max_steps": 10, "new": 3}, allow_change=True)  # of some there is no going on
    with pytest.raises(UserError, match=r"seed 1 -> 2\): .*or go on with the change by --allow_resume_change"):
        run.check_trajectory({"seed": 2, "max_steps": 10, "processes": 2})
    run.check_trajectory({"seed": 2, "max_steps": 10, "processes": 2}, allow_change=True)


def test_rewinding_drops_what_will_be_written_again(tmp_path: Path) -> None:
    run = RunDirectory(str(tmp_path))
    for step in (0, 1, 2, 3):
        run.append("metrics.jsonl", {"step": step, "text": "\u2028"})
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        # A full disk cut a line inside a curly quote; others are no events.
        file.write(b'[1]\nnull\n{"step": 1, "eval_loss": null}\n{"step": "2"}\n{"step": 1, "text": "\xe2\x80')
    run.append("metrics.jsonl", {"step": 4})
    assert run.last_validation() == {"eval_loss": None} and run.validation_at(1) == {"eval_loss": None}
    run.rewind(2)
    lines = (tmp_path / "metrics.jsonl").read_text().split("\n")
    assert [json.loads(line)["step"] for line in lines[:-1]] == [0, 1, 2, 1] and lines[-1] == ""


def test_events_are_lines(tmp_path: Path) -> None:
    run = RunDirectory(str(tmp_path))
    for step in (1, 2):
        run.append("metrics.jsonl", {"step": step, "text": "a\nb\u2028ü"})
    lines = (tmp_path / "metrics.jsonl").read_text().split("\n")
    assert [json.loads(line)["step"] for line in lines[:-1]] == [1, 2] and lines[-1] == ""


def test_the_environment_names_versions_and_command() -> None:
    environment = describe_environment()
    assert environment["versions"].keys() >= {"python", "torch", "transformers", "accelerate"}
    assert environment["command"] and environment["started"]


def test_a_validation_that_is_made_again_is_written_once(tmp_path: Path) -> None:
    run = RunDirectory(str(tmp_path))
    for event in ({"step": 1, "eval_loss": 4.0}, {"step": 2, "loss": 3.0}, {"step": 2, "eval_loss": 3.0}):
        run.append("metrics.jsonl", event)
    run.append("samples.jsonl", {"step": 2, "text": "once"})
    for again, kept in ((False, 3), (True, 2)):
        run.rewind(2, validates_again=again)
        assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == kept
    assert (tmp_path / "samples.jsonl").read_text() == ""


def test_a_full_disk_costs_words_and_not_the_run(
    tmp_path: Path, monkeypatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = RunDirectory(str(tmp_path))
    run.write_status("running", step=1)
    with monkeypatch.context() as full:
        full.setattr("gpt2_repro.training.run_directory.write_whole", Full())
        run.write_status("running", step=2)
    with monkeypatch.context() as full:
        full.setattr("gpt2_repro.training.run_directory.append_line", Full())
        run.append("metrics.jsonl", {"step": 2})
    assert (
        "run_status.json is not up to date (No space left" in caplog.text
        and "an event of step 2 is lost" in caplog.text
    )


class Full:
    def __call__(self, *args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(("supervised_before", "idle"), [(None, 0), (-100, 75), (-50, 0)])
def test_the_wait_of_a_supervised_run_is_paid_too(
    supervised_before: float | None, idle: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the last sign of an attempt to the next process, on the same machine."""
    notes = tmp_path / "notes"
    notes.mkdir()
    began = time.time() - process_seconds()
    if supervised_before is not None:
        monkeypatch.setenv(FOLDER, str(notes))
        (notes / SINCE).write_text(str(began + supervised_before))
    last = datetime.datetime.fromtimestamp(began - 75, datetime.UTC).isoformat(timespec="seconds")
    before = {"seconds": 1000, "updated": last, "accounts": {"training": 900, "idle": 40}}
    (tmp_path / "run_status.json").write_text(json.dumps(before))
    run = RunDirectory(str(tmp_path))
    run.lock()
    accounts = run.accounts()
    assert accounts["idle"] == pytest.approx(40 + idle, abs=1.1)
    assert (accounts["training"], accounts["redone"]) == (900, 60)  # 60 s of an attempt that recorded nothing
    assert run.seconds() == pytest.approx(sum(accounts.values()), abs=0.2)


@pytest.mark.parametrize(
    ("start", "at_checkpoint", "expected"),
    [
        (8, {"training": 700, "data": 60}, (900, 0, 100)),  # no step is repeated
        (6, {"training": 700, "data": 60}, (700, 240, 60)),
        (0, {}, (0, 1000, 0)),
    ],
)
def test_repeated_steps_are_redone(start: int, at_checkpoint: dict, expected: tuple, tmp_path: Path) -> None:
    before = {"seconds": 1010, "step": 8, "accounts": {"startup": 10, "training": 900, "data": 100}}
    (tmp_path / "run_status.json").write_text(json.dumps(before))
    run = RunDirectory(str(tmp_path))
    run.lock()
    run.book_redone_steps(start, at_checkpoint)
    accounts = run.accounts()
    assert tuple(accounts[name] for name in ("training", "redone", "data")) == expected
    assert run.seconds() == pytest.approx(sum(accounts.values()), abs=0.2)


def test_what_dies_early_is_booked_and_the_next_attempt_takes_it_up(tmp_path: Path) -> None:
    (tmp_path / "run_status.json").write_text('{"state": "stopped", "seconds": 100}')  # of before there were accounts
    for attempt in (1, 2):
        run = RunDirectory(str(tmp_path))
        run.claim("recipe")  # and the process dies
        status = run.read_status()
        assert status["seconds"] == pytest.approx(sum(status["accounts"].values()), abs=0.2)
        assert status["accounts"]["redone"] == 100
        assert status["accounts"]["startup"] == pytest.approx(attempt * process_seconds(), rel=0.1)
        assert run._lock is not None
        run._lock.close()

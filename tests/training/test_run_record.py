"""RunRecord reads and writes the lock, status, environment, events and times."""

import datetime
import errno
import functools
import json
import os
import platform
import subprocess
import time
from pathlib import Path

import pytest

from gpt2_repro import run_record
from gpt2_repro.batch_plan import BatchPlan
from gpt2_repro.data.prepared import PreparedData, exclusive_lock
from gpt2_repro.errors import UserError
from gpt2_repro.run_record import HOLDER, RunRecord, checkpoints, events
from gpt2_repro.run_record.environment import Environment
from gpt2_repro.run_record.status import RunStatus, process_seconds
from gpt2_repro.run_record.supervision import ENDED, FOLDER, SINCE
from gpt2_repro.training.resuming import require_same_run


@pytest.fixture
def run(tmp_path: Path) -> RunRecord:
    return RunRecord(tmp_path / "run")


def steps_of(run: RunRecord, name: str = "metrics.jsonl") -> list[int]:
    lines = (run.path / name).read_text(encoding="utf-8").split("\n")
    assert lines[-1] == ""
    return [json.loads(line)["step"] for line in lines[:-1]]


def test_second_job_cannot_use_the_run_directory(finished: Path, typed) -> None:
    """A second job cannot write to the run directory of a running job."""
    run = RunRecord(finished)
    run.lock()
    second = typed(finished, "--extend_to", 4096)
    assert second.returncode == 2 and f"process {os.getpid()} on" in second.stderr
    assert run._lock is not None
    run._lock.close()  # the end of a process closes the lock too
    RunRecord(finished).lock()


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOTSUP, errno.EINVAL, errno.ENOLCK, errno.EBADF])
def test_file_system_without_locks_is_used_after_a_warning(run: RunRecord, number: int, monkeypatch, caplog) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", flock)
    run.lock()
    run.lock()
    assert run.lock_descriptor >= 0 and [record.levelname for record in caplog.records] == ["WARNING"]
    with exclusive_lock(run.path, "in use"):
        PreparedData(run.path, None).lock()  # type: ignore[arg-type]
    assert len(caplog.records) == 3


def test_start_waits_for_the_writer_of_a_job_that_has_ended(run: RunRecord, monkeypatch) -> None:
    job = subprocess.Popen(["true"])
    run.lock()
    job.wait()
    (run.path / ".lock").write_text(HOLDER.format(job.pid, platform.node()), encoding="utf-8")
    writer = subprocess.Popen(["sleep", "0.5"], pass_fds=[run.lock_descriptor])
    assert run._lock is not None
    run._lock.close()
    second = RunRecord(run.path)
    monkeypatch.setattr(run_record, "WRITING", 0.0)
    with pytest.raises(UserError):
        second.lock()
    monkeypatch.undo()
    second.lock()
    assert writer.wait(0.1) == 0
    (run.path / ".lock").write_text(HOLDER.format(job.pid, "another-machine"), encoding="utf-8")
    with pytest.raises(UserError):
        RunRecord(run.path).lock()


def test_status_keeps_earlier_values(run: RunRecord) -> None:
    assert run.status() == RunStatus()
    run.write_status("running", step=5, max_steps=10)
    run.write_status("stopped", step=7)
    status = run.status()
    assert (status.state, status.step, status.max_steps) == ("stopped", 7, 10)
    run.write_status("complete")
    assert [path.name for path in run.path.iterdir()] == ["run_status.json"]
    assert not run.is_finished(10)  # without final/ the run is not finished
    final = run.path / "final"
    final.mkdir()
    (final / "model.safetensors").write_text("weights", encoding="utf-8")
    record = {"step": 10, "tokens": 1, "losses": {}}
    checkpoints.seal(final, {}, **record, environment={"trajectory": {"max_steps": 8}})  # as in earlier versions
    assert not run.is_finished(10)
    (final / "manifest.json").unlink()
    checkpoints.seal(final, {}, **record, environment={"run_identity": {"max_steps": 8}})
    # 10 is the current step. 8 is the length in the original command, before an extension.
    assert [steps for steps in (8, 9, 10, 20) if run.is_finished(steps)] == [8, 10]
    (final / "model.safetensors").write_text("", encoding="utf-8")
    assert not run.is_finished(10)
    (run.path / "run_status.json").write_bytes(b"\0" * 100)
    assert run.status() == RunStatus()


def test_environment_is_read_as_written_and_damage_is_an_empty_one(run: RunRecord) -> None:
    assert run.environment() == Environment()
    whole = Environment(seed=1, plan=BatchPlan(256, 32, 4, 1, 2, 12), deviations=[{"a": 1}], engine={"clip": None})
    run.write_environment(whole)
    assert run.environment() == whole and whole.to_json()["plan"]["total_tokens"] == 12 * 256
    for damage in ({"seed": "one"}, {"plan": None}):
        (run.path / "environment.json").write_text(json.dumps(whole.to_json() | damage), encoding="utf-8")
        assert run.environment() == Environment()


PROOFS = {
    "recipe.yaml": "training: {seed: 1}",
    "run_status.json": '{"state": "stopped"}',
    "environment.json": '{"run_identity": {"seed": 1}}',
    "checkpoint-4/manifest.json": json.dumps({"files": {}, "sha256": checkpoints.manifest_hash({"files": {}})}),
}


@pytest.mark.parametrize("kept", PROOFS)
def test_only_new_and_existing_run_directories_are_accepted(kept: str, run: RunRecord) -> None:
    run.check_owner()
    (run.path / "checkpoint-4").mkdir(parents=True)
    for name in (".lock", *PROOFS):  # a power cut can leave empty files
        (run.path / name).touch()
    with pytest.raises(UserError, match="--output_dir"):
        run.check_owner()
    (run.path / kept).write_text(PROOFS[kept], encoding="utf-8")
    run.check_owner()


def test_another_run_is_refused_with_all_differences(run: RunRecord) -> None:
    run.write_environment(Environment(run_identity={"seed": 1, "max_steps": 10, "processes": 2}))
    check = functools.partial(require_same_run, run.environment().run_identity, where=run.path)
    check({"seed": 1, "max_steps": 10, "processes": 2, "muon_momentum": 0.95})  # the default of older checkpoints
    with pytest.raises(UserError, match=r"muon_momentum 0\.95 -> 0\.9\)"):
        check({"seed": 1, "max_steps": 10, "processes": 2, "muon_momentum": 0.9})
    with pytest.raises(UserError, match=r"seed 1 -> 2; processes 2 -> None; new None -> 3.*--output_dir") as error:
        check({"seed": 2, "max_steps": 10, "new": 3}, allow_change=True)  # not all of these changes can be allowed
    assert "--allow_resume_change" not in str(error.value)


def test_rewind_removes_events_that_will_be_repeated(run: RunRecord) -> None:
    run.path.mkdir()
    for event in ({"step": 0}, {"step": 1, "eval_loss": 4.0}, {"step": 2, "loss": 3.0}, {"step": 2, "eval_loss": 3.0}):
        events.append(run.metrics, event | {"text": "a\nb\u2028ü"})
    events.append(run.samples, {"step": 2, "text": "once"})
    with (run.path / "metrics.jsonl").open("ab") as file:
        # Lines that are not events. A full disk cut the last line inside a curly quote.
        file.write(b'[1]\nnull\n{"step": 1, "eval_loss": null}\n{"step": "2"}\n{"step": 1, "text": "\xe2\x80')
    events.append(run.metrics, {"step": 4})
    assert run.validation_losses(2) == {"eval_loss": 3.0} and run.validation_losses(3) == {}
    assert run.validation_losses() == run.validation_losses(1) == {"eval_loss": None}  # the last event in the file
    run.rewind(2)
    assert steps_of(run) == [0, 1, 2, 2, 1] and steps_of(run, "samples.jsonl") == [2]
    run.rewind(2, validates_again=True)
    assert steps_of(run) == [0, 1, 1] and steps_of(run, "samples.jsonl") == []


@pytest.mark.parametrize("writer", ["write_whole", "events.append_line"])
def test_full_disk_is_logged_and_does_not_end_the_run(run: RunRecord, writer: str, monkeypatch, caplog) -> None:
    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(f"gpt2_repro.run_record.{writer}", full)
    run.path.mkdir()
    run.write_status("running", step=2)
    events.append(run.metrics, {"step": 2})
    assert len(caplog.records) == 1


LATE = {"training": 700, "data": 60}  # seconds at the checkpoint of step 6. At step 8 they are 900 and 100.


@pytest.mark.parametrize(
    ("start", "at_checkpoint", "supervised", "ended", "training", "redone", "data", "idle"),
    [
        # No step is repeated. 60 s belong to an attempt that recorded nothing.
        (8, LATE, None, None, 900, 60, 100, 40),
        (6, LATE, None, None, 700, 300, 60, 40),
        (0, {}, None, None, 0, 1060, 0, 40),
        (8, LATE, -100, -75, 900, 60, 100, 115),
        (8, LATE, -100, -30, 900, 105, 100, 70),  # the last attempt trained 45 s after its last record
        (8, LATE, -50, None, 900, 60, 100, 40),  # the last attempt had another supervisor
    ],
)
def test_time_of_earlier_attempts_is_counted(
    run, start, at_checkpoint, supervised, ended, training, redone, data, idle, tmp_path, monkeypatch
) -> None:
    began = time.time() - process_seconds()
    if supervised is not None:
        monkeypatch.setenv(FOLDER, str(tmp_path))
        (tmp_path / SINCE).write_text(str(began + supervised), encoding="utf-8")
    if ended is not None:
        (tmp_path / ENDED).write_text(str(began + ended), encoding="utf-8")
    last = datetime.datetime.fromtimestamp(began - 75, datetime.UTC).isoformat(timespec="seconds")
    parts = {"training": 900, "data": 100, "idle": 40}
    before = {"seconds": 1100, "step": 8, "updated": last, "time_breakdown": parts}
    run.path.mkdir()
    (run.path / "run_status.json").write_text(json.dumps(before), encoding="utf-8")
    run.lock()
    run.add_redone_steps(start, at_checkpoint)
    found = run.time_breakdown()
    assert (found["training"], found["data"]) == (training, data)
    assert (found["redone"], found["idle"]) == (pytest.approx(redone, abs=1.1), pytest.approx(idle, abs=1.1))
    assert run.seconds() == pytest.approx(sum(found.values()), abs=0.2)

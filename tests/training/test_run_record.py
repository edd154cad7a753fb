"""A run is locked, its events can be rewound, and its times and speed are right."""

import dataclasses
import datetime
import errno
import json
import os
import platform
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch

from gpt2_repro import run_record
from gpt2_repro.checkpoints.manifest import manifest_hash
from gpt2_repro.checkpoints.resuming import check_owner
from gpt2_repro.data.prepared import PreparedData, exclusive_lock
from gpt2_repro.errors import UserError
from gpt2_repro.hardware import Accelerator
from gpt2_repro.run_record import HOLDER, RunRecord, events
from gpt2_repro.run_record.environment import BatchPlan, Environment
from gpt2_repro.run_record.notes import ENDED, FOLDER, SINCE
from gpt2_repro.run_record.status import process_seconds
from gpt2_repro.run_record.time_breakdown import breakdown, goodput
from gpt2_repro.training.meter import Meter
from gpt2_repro.training.progress import format_event


@pytest.fixture
def run(tmp_path: Path) -> RunRecord:
    return RunRecord(tmp_path / "run")


def steps_of(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text(encoding="utf-8").split("\n")[:-1]]


def test_a_killed_run_is_recognised_on_its_machine(run: RunRecord, tmp_path: Path) -> None:
    """Only a lock that a process of this machine has left is a sign: not a folder that was copied from another one."""
    assert not run.was_killed(), "there is no run"
    pid = os.fork()
    if not pid:
        run.claim("{}")
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    lock = run.path / ".lock"
    before = {path: path.read_bytes() for path in run.path.iterdir()}
    assert run.status().state == "running" and run.was_killed()
    assert {path: path.read_bytes() for path in run.path.iterdir()} == before
    for holder in ("process 7 on another-machine", "", "damaged"):
        lock.write_text(holder, encoding="utf-8")
        assert not run.was_killed()
    lock.unlink()
    assert not run.was_killed()
    with lock.open("w", encoding="utf-8") as file:
        file.write(HOLDER.format(pid, platform.node()))
    assert run.was_killed()
    run.write_status("stopped")
    assert not run.was_killed()


def test_a_run_is_not_killed_while_its_process_or_its_writer_lives(run: RunRecord) -> None:
    run.claim("{}")
    assert not RunRecord(run.path).was_killed()
    writer = subprocess.Popen(["sleep", "60"], pass_fds=[run.lock_descriptor])
    run.unlock()
    assert not run.was_killed()
    writer.kill()
    writer.wait()
    assert run.was_killed()


def test_another_machine_records_a_failure_only_of_a_running_run(run: RunRecord) -> None:
    run.claim("{}")
    run.write_status("running", step=7)
    before = run.status()
    RunRecord(run.path).replace_running("failed", "rank 0 is lost")
    assert run.status() == dataclasses.replace(before, state="failed", reason="rank 0 is lost")
    for state in ("complete", "stopped", "diverged"):
        run.write_status(state, reason=None)
        RunRecord(run.path).replace_running("failed", "too late")
        assert (run.status().state, run.status().reason) == (state, None)
    run.path.joinpath("run_status.json").unlink()
    RunRecord(run.path).replace_running("failed", "not a run")
    assert run.status().state is None


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK])
def test_without_locks_nothing_is_known_of_the_process(run: RunRecord, number: int, monkeypatch) -> None:
    run.claim("{}")
    run.unlock()
    assert run.was_killed()

    def flock(descriptor: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", flock)
    assert not run.was_killed()


def test_the_status_tells_whether_the_run_is_supervised(run: RunRecord, tmp_path: Path, monkeypatch) -> None:
    run.write_status("failed")
    assert not run.status().is_supervised and run.status().age() < 60
    monkeypatch.setenv(FOLDER, str(tmp_path))
    run.write_status("failed")
    assert run.status().is_supervised


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOTSUP, errno.EINVAL, errno.ENOLCK, errno.EBADF])
def test_file_system_without_locks_is_used_after_a_warning(run: RunRecord, number: int, monkeypatch, caplog) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", flock)
    run.lock()
    run.lock()
    assert run.lock_descriptor >= 0 and [record.levelname for record in caplog.records] == ["WARNING"]
    with exclusive_lock(run.path, "in use"):
        PreparedData(run.path, None).lock()
    assert len(caplog.records) == 3


def test_start_waits_for_the_writer_of_a_job_that_has_ended(run: RunRecord, monkeypatch) -> None:
    job = subprocess.Popen(["true"])
    run.lock()
    job.wait()
    (run.path / ".lock").write_text(HOLDER.format(job.pid, platform.node()), encoding="utf-8")
    writer = subprocess.Popen(["sleep", "0.5"], pass_fds=[run.lock_descriptor])
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


ZEROS = b"\0" * 100  # a power cut can leave files with such blocks
PROOFS = {
    "recipe.yaml": "training: {seed: 1}",
    "run_status.json": '{"state": "stopped"}',
    "environment.json": '{"run_identity": {"seed": 1}}',
    "checkpoint-4/manifest.json": json.dumps({"files": {}, "sha256": manifest_hash({"files": {}})}),
}


def test_only_new_and_existing_run_directories_are_accepted(run: RunRecord) -> None:
    check_owner(run)
    (run.path / "checkpoint-4").mkdir(parents=True)
    for name in (".lock", *PROOFS):
        (run.path / name).write_bytes(ZEROS)
    with pytest.raises(UserError, match="--output_dir"):
        check_owner(run)
    for name, text in PROOFS.items():
        (run.path / name).write_text(text, encoding="utf-8")
        check_owner(run)
        (run.path / name).write_bytes(ZEROS)


def test_rewind_removes_events_that_will_be_repeated(run: RunRecord) -> None:
    run.path.mkdir()
    for event in ({"step": 0}, {"step": 1, "eval_loss": 4.0}, {"step": 2, "loss": 3.0}, {"step": 2, "eval_loss": 3.0}):
        events.append(run.metrics, event | {"text": "a\nb\u2028ü"})
    events.append(run.samples, {"step": 2, "text": "once"})
    with run.metrics.open("ab") as file:
        # Lines that are not events. A full disk cut the last line inside a curly quote.
        file.write(b'[1]\nnull\n{"step": 1, "eval_loss": null}\n{"step": "2"}\n{"step": 1, "text": "\xe2\x80')
    events.append(run.metrics, {"step": 4})
    losses = {step: events.validation_losses(run.metrics, step) for step in (1, 2, 3, None)}
    assert losses[2] == {"eval_loss": 3.0} and losses[3] == {}
    assert losses[None] == losses[1] == {"eval_loss": None}  # the last event in the file
    for again, steps, sampled in ((False, [0, 1, 2, 2, 1], [2]), (True, [0, 1, 1], [])):
        run.rewind(2, validates_again=again)
        assert steps_of(run.metrics) == steps and steps_of(run.samples) == sampled


def test_full_disk_is_logged_and_does_not_end_the_run(run: RunRecord, caplog) -> None:
    (run.path / "run_status.json").mkdir(parents=True)  # it cannot be replaced
    run.metrics.symlink_to("/dev/full")
    run.write_status("running", step=2)
    events.append(run.metrics, {"step": 2})
    assert len(caplog.records) == 2


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def test_every_second_is_counted_once(clock: list[float]) -> None:
    meter = Meter(Environment(), compiled=True)
    before = meter.seconds("startup")
    assert 0 < before <= process_seconds()
    with meter.on("validation"):  # before the first step
        clock[0] += 2
        with pytest.raises(KeyError), meter.on("saving"):
            clock[0] += 3
            raise KeyError
        clock[0] += 4
    meter.start(0)  # this step compiles
    clock[0] += 20
    meter.start(0)
    clock[0] += 10
    with meter.on("data"):
        clock[0] += 1
    clock[0] += 0.5
    found = {name: seconds for name, seconds in meter.time_breakdown().items() if seconds}
    assert found == pytest.approx({"startup": before + 20, "validation": 6, "training": 10.5, "data": 1, "saving": 3})


@pytest.mark.parametrize(("precision", "peak"), [("bf16", 1e5 / 8), ("fp32", 1e5 / 8), ("bf16", None)])
def test_speed_counts_training_time_only(
    precision: str, peak: float | None, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 0)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    mfu = {"mfu": 0.5} if precision == "bf16" and peak else {}
    gpus, plan = Accelerator("cuda", "GPU", 8, peak, None), BatchPlan(8192, 1024, 1, 8, 1, 10)
    meter = Meter(Environment(accelerator=gpus, plan=plan, flops_per_token=50, precision=precision))
    clock[0] += 1000
    assert meter.read(0) == {"peak_memory_gb": 0}
    meter.start(5000)
    for tokens, waiting in ((13_000, 2), (21_000, 0)):
        clock[0] += 8 - waiting
        with meter.on("data"):
            clock[0] += waiting
        with meter.on("validation"):
            clock[0] += 1000
        expected = {"tokens_per_second": 1000.0, "data_wait": waiting / 8, "peak_memory_gb": 0, **mfu}
        assert meter.read(tokens) == expected


def test_the_peak_memory_is_that_of_the_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = {"peak": 0.0}

    def reset() -> None:
        memory["peak"] = 2e9  # weights and optimizer stay

    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: memory["peak"])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset)
    plan = BatchPlan(8192, 1024, 1, 8, 1, 10)
    meter = Meter(Environment(accelerator=Accelerator("cuda", "GPU", 8, None, 80 * 10**9), plan=plan))
    memory["peak"] = 41_266_000_000
    assert meter.read(0) == {"peak_memory_gb": 41.27}  # the step that compiles has no speed
    meter.start(0)
    assert meter.read(8192)["peak_memory_gb"] == 2
    without = Meter(Environment(accelerator=Accelerator("cpu", "CPU", 1, None, None), plan=plan))
    without.start(0)
    assert "peak_memory_gb" not in without.read(8192)
    line = format_event({"step": 1, "loss": 3.0, "tokens": 8192, "peak_memory_gb": 41.27})
    assert "peak 41.3 GB" in line
    assert "GB" not in format_event({"step": 1, "loss": 3.0, "tokens": 8192})


def test_goodput_counts_only_the_steps_that_were_kept() -> None:
    parts = {"startup": 20, "training": 100, "data": 20, "redone": 40, "saving": 20}
    assert goodput(parts) == 0.6 and goodput({}) == 0
    rows = breakdown(parts, usd_per_hour=3.6).rows
    costs = {name.text: (share.text, usd.text) for name, _, share, usd in rows}
    assert costs["total"] == ("100.0%", "$0.20") and costs["goodput: training+data"] == ("60.0%", "$0.12")


def test_time_before_a_checkpoint_is_counted_without_a_status(run) -> None:
    run.lock()
    run.add_redone_steps(8, {"training": 500.0})
    assert run.seconds() >= 500


@pytest.mark.parametrize(
    ("start", "at_checkpoint", "supervised", "ended", "expected"),
    [
        # No step is repeated. 60 s belong to an attempt that recorded nothing.
        (8, {}, None, None, {"training": 900, "redone": 60, "data": 100, "idle": 40}),
        (6, {"training": 700, "data": 60}, None, None, {"training": 700, "redone": 300, "data": 60, "idle": 40}),
        (0, {}, None, None, {"training": 0, "redone": 1060, "data": 0, "idle": 40}),
        (8, {}, -100, -75, {"training": 900, "redone": 60, "data": 100, "idle": 115}),
        # The last attempt trained 45 s after its last record.
        (8, {}, -100, -30, {"training": 900, "redone": 105, "data": 100, "idle": 70}),
        # The last attempt had another supervisor.
        (8, {}, -50, None, {"training": 900, "redone": 60, "data": 100, "idle": 40}),
    ],
)
def test_time_of_earlier_attempts(start, at_checkpoint, supervised, ended, expected, run, tmp_path, monkeypatch):
    began = time.time() - process_seconds()
    monkeypatch.setenv(FOLDER, str(tmp_path))
    for name, seconds in ((SINCE, supervised), (ENDED, ended)):
        if seconds is not None:
            (tmp_path / name).write_text(str(began + seconds), encoding="utf-8")
    last = datetime.datetime.fromtimestamp(began - 75, datetime.UTC).isoformat(timespec="seconds")
    parts = {"training": 900, "data": 100, "idle": 40}
    before = {"seconds": 1100, "step": 8, "updated": last, "time_breakdown": parts}
    run.path.mkdir()
    (run.path / "run_status.json").write_text(json.dumps(before), encoding="utf-8")
    run.lock()
    run.add_redone_steps(start, at_checkpoint)
    found = run.time_breakdown()
    assert {name: found[name] for name in expected} == pytest.approx(expected, abs=1.1)
    assert run.seconds() == pytest.approx(sum(found.values()), abs=0.2)

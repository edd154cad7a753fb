"""Runs that are killed often end with the results of runs without faults."""

import contextlib
import os
import random
import shutil
import signal
import time
from pathlib import Path

import psutil
import pytest

from gpt2_repro.checkpoints.rotation import complete_checkpoints
from gpt2_repro.run_record.layout import step_of
from tests.faults.runs import Started, losses, results


KILLS = int(os.environ.get("CHAOS_KILLS", "25"))  # of all tests together
OPTIONS = (
    *("--save_steps", 10, "--eval_steps", 50, "--logging_steps", 7, "--per_device_train_batch_size", 4),
    *("--dataloader_num_workers", 1, "--sample_tokens", 0),
)


def workers_of(command: Started, launcher: tuple) -> list[psutil.Process]:
    """Return the training processes, or [] until all of them have started."""
    if launcher == ("python",):
        return [psutil.Process(command.process.pid)]
    workers = list(command.ranks().values())
    return workers if len(workers) == launcher[1] else []


def strike(command: Started, workers: list[psutil.Process], source: random.Random) -> str:
    """Cause a random fault in the run of `command`, and return the name of the fault."""
    # Until the launcher has started its workers, only the launcher can be killed.
    what = source.choice(["launcher", "worker", "all", "term"]) if workers else "launcher"
    targets = [source.choice(workers)] if what in ("worker", "term") else workers if what == "all" else []
    with contextlib.suppress(psutil.Error, ProcessLookupError):
        if what in ("launcher", "all"):
            command.process.kill()
        for process in targets:
            process.send_signal(signal.SIGTERM if what == "term" else signal.SIGKILL)
    return what


def newest(run: Path) -> int:
    return max([step_of(path) for path in complete_checkpoints(run)], default=-1)


WITH_DROPOUT = ("--max_steps", 800, "--bf16", "true", "--dropout", 0.1)
IN_FP32 = ("--max_steps", 400, "--bf16", "false", "--learning_rate", 1e-3)
# The launchers of the starts. No launcher reads both a checkpoint of DeepSpeed and a checkpoint of DDP.
RUNS = {
    "zero1": (0.36, [("launch", 2)], WITH_DROPOUT),
    "zero1-on-2-and-1": (0.32, [("launch", 2), ("launch", 1)], IN_FP32),
    "ddp-and-one-process": (0.32, [("ddp", 2), ("python",)], IN_FP32),
}


@pytest.mark.chaos
@pytest.mark.parametrize("name", RUNS)
def test_kills_lose_nothing(name: str, train, start, tmp_path: Path) -> None:
    """After random faults, a run has the losses and final weights of a faultless run.

    With one layout they are equal. If each start may have another layout, losses agree to 1e-4. At a rate of 1e-3, the
    losses of faultless runs on different layouts differ by up to 1.1e-6. At 1e-2, rounding grows to 8e-3.
    """
    share, launchers, options = RUNS[name]
    options = (*OPTIONS, *options)
    golden = train(tmp_path / "golden", *options, launcher=launchers[0])
    run, source, done = tmp_path / "run", random.Random(), []
    while len(done) < round(share * KILLS):
        before, launcher = newest(run), source.choice(launchers)
        command = start(run, *options, launcher=launcher, log=f"{len(done)}.log")
        if source.random() < 0.25:  # during the start, or shortly after
            time.sleep(source.uniform(0.5, 12))
        else:
            goal = max(before, 0) + source.randrange(1, 60)
            command.wait_until(lambda: command.step() >= goal or (run / "final").is_dir())  # noqa: B023
        if (run / "final").is_dir():
            command.end()
            check(run, golden, exact=len(launchers) == 1)
            shutil.rmtree(run)  # finished before it could be killed: start again
            continue
        left = psutil.Process(command.process.pid).children(recursive=True)
        done.append(strike(command, workers_of(command, launcher), source))
        command.end()
        _, alive = psutil.wait_procs(left, timeout=30)
        assert not alive, f"{done[-1]}: {alive} still running"
        print(f"{len(done)} {launcher} {done[-1]}: checkpoint-{before} -> checkpoint-{newest(run)}")
        assert newest(run) >= before
    train(run, *options, launcher=source.choice(launchers))
    check(run, golden, exact=len(launchers) == 1)


def check(run: Path, golden: Path, *, exact: bool) -> None:
    """Compare a killed run with a faultless run."""
    if exact:
        assert results(run) == results(golden)
    else:
        ours, theirs = ({loss[:2]: loss[2] for loss in losses(folder)} for folder in (run, golden))
        assert {key: ours[key] for key in theirs} == pytest.approx(theirs, abs=1e-4)

"""A run that is killed 25 times ends with the results of a run without faults."""

import contextlib
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from gpt2_repro.run_record.checkpoints import complete_checkpoints, step_of
from tests.faults.runs import losses, weights


KILLS = 25
STEPS = 1600
OPTIONS = (
    *("--max_steps", STEPS, "--save_steps", 10, "--eval_steps", 50, "--logging_steps", 7, "--dropout", 0.1),
    *("--bf16", "true", "--per_device_train_batch_size", 4, "--dataloader_num_workers", 1, "--sample_tokens", 0),
)


def strike(command, source: random.Random, disk: Path) -> str:
    """Cause a random fault in the run of `command`, and return the name of the fault."""
    ranks = command.ranks()
    # Until the launcher has started its workers, only the launcher can be killed.
    what = source.choice(["launcher", "worker", "all", "term", "disk"] if len(ranks) == 2 else ["launcher"])
    filler = disk / "filler"
    if what == "disk":
        # The run may use the free space first, or may still run after 5 s.
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            filler.write_bytes(b"x" * max(0, shutil.disk_usage(disk).free - source.randrange(300_000)))
            command.process.wait(5)
    with contextlib.suppress(psutil.Error, ProcessLookupError):
        if what in ("worker", "term"):
            ranks[source.choice([0, 1])].send_signal(signal.SIGKILL if what == "worker" else signal.SIGTERM)
        else:
            command.process.kill()
        for process in ranks.values() if what in ("all", "disk") else ():
            process.kill()
    filler.unlink(missing_ok=True)
    return what


def newest(run: Path) -> int:
    return max([step_of(path) for path in complete_checkpoints(run)], default=-1)


@pytest.mark.chaos
def test_twenty_five_kills_lose_nothing(train, start, small_disk: Path, tmp_path: Path, capsys) -> None:
    """After 25 random faults, losses and final weights are those of a faultless run."""
    golden = train(tmp_path / "golden", *OPTIONS, launcher=("launch", 2))
    run, source, done = small_disk / "run", random.Random(), []
    while len(done) < KILLS:
        before = newest(run)
        command = start(run, *OPTIONS, launcher=("launch", 2), log=f"../{len(done)}.log")
        if source.random() < 0.25:  # during the start, or shortly after
            time.sleep(source.uniform(0.5, 12))
        else:
            goal = max(before, 0) + source.randrange(1, 60)
            command.wait_until(lambda: command.step() >= goal or (run / "final").is_dir())  # noqa: B023
        if (run / "final").is_dir():
            shutil.rmtree(run)  # finished before it could be killed: start again
            continue
        left = psutil.Process(command.process.pid).children(recursive=True)
        done.append(strike(command, source, small_disk))
        command.end()
        _, alive = psutil.wait_procs(left, timeout=30)
        assert not alive, f"{done[-1]}: {alive} still running"
        with capsys.disabled():
            print(f"{len(done):>3} {done[-1]:<9} checkpoint-{before} -> checkpoint-{newest(run)}", flush=True)
        assert newest(run) >= before
    train(run, *OPTIONS, launcher=("launch", 2))
    assert losses(run) == losses(golden) and weights(run) == weights(golden)

"""Twenty-five kills in a row lose nothing: the run that they hit ends as the one beside it that was left alone."""

import contextlib
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from gpt2_repro.training.checkpoints import complete_checkpoints, step_of
from tests.faults.runs import losses, weights


KILLS = 25
STEPS = 1600
OPTIONS = (
    *("--max_steps", STEPS, "--save_steps", 10, "--eval_steps", 50, "--logging_steps", 7, "--dropout", 0.1),
    *("--bf16", "true", "--per_device_train_batch_size", 4, "--dataloader_num_workers", 1, "--sample_tokens", 0),
)


def strike(command, source: random.Random, disk: Path) -> str:
    """Do one of the things that happen to rented machines."""
    ranks = command.ranks()
    # Before the launcher has started its workers there is only itself to hit.
    what = source.choice(["launcher", "worker", "all", "term", "disk"] if len(ranks) == 2 else ["launcher"])
    filler = disk / "filler"
    if what == "disk":
        with contextlib.suppress(OSError):  # the run may have been quicker with what was free
            filler.write_bytes(b"x" * max(0, shutil.disk_usage(disk).free - source.randrange(300_000)))
        with contextlib.suppress(subprocess.TimeoutExpired):
            command.process.wait(5)
    with contextlib.suppress(psutil.Error, ProcessLookupError):
        if what == "worker":
            ranks[source.choice([0, 1])].kill()
        elif what == "term":
            ranks[source.choice([0, 1])].send_signal(signal.SIGTERM)
        else:
            command.process.kill()
        for process in ranks.values() if what in ("all", "disk") else ():
            process.kill()
    filler.unlink(missing_ok=True)
    return what


def is_complete(run: Path) -> bool:
    return (run / "final").is_dir()


@pytest.mark.chaos
def test_twenty_five_kills_lose_nothing(train, start, tmp_path: Path, capsys) -> None:
    """SIGKILLs of launchers and workers, SIGTERMs of single ranks, a disk that fills up; P1, P2, P3, P5, P11."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", disk], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"a disk that can be filled needs root: {mounted.stderr.strip()}")
    try:
        golden = train(tmp_path / "golden", *OPTIONS, launcher=("launch", 2))
        run, source, done = disk / "run", random.Random(), []
        while len(done) < KILLS:
            before = max([step_of(path) for path in complete_checkpoints(run)], default=-1)
            command = start(run, *OPTIONS, launcher=("launch", 2), log=f"../{len(done)}.log")
            if source.random() < 0.25:  # while it starts, or shortly after
                time.sleep(source.uniform(0.5, 12))
            else:
                goal = max(before, 0) + source.randrange(1, 60)
                command.wait_until(lambda: command.step() >= goal or is_complete(run))  # noqa: B023
            if is_complete(run):
                shutil.rmtree(run)  # done too soon: once more from the beginning
                continue
            left = psutil.Process(command.process.pid).children(recursive=True)
            done.append(strike(command, source, disk))
            command.end()
            _, alive = psutil.wait_procs(left, timeout=30)
            assert not alive, f"{done[-1]}: {alive} still there"
            after = max([step_of(path) for path in complete_checkpoints(run)], default=-1)
            assert after >= before, f"{done[-1]} lost checkpoint-{before}"
            with capsys.disabled():
                print(f"{len(done):>3} {done[-1]:<9} checkpoint-{before} -> checkpoint-{after}", flush=True)
        train(run, *OPTIONS, launcher=("launch", 2))
        assert losses(run) == losses(golden)
        assert weights(run) == weights(golden)
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)

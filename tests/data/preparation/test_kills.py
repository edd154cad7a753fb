"""A preparation that is killed and resumed several times gives the same folder."""

import contextlib
import glob
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.commands import ROOT, start_command


pytestmark = pytest.mark.slow

# Parts of 2 KB and shards of 3 KB, so that one second of work has a hundred points at which a kill can happen.
STORY = """
import sys
import prepare_data
from gpt2_repro import cli
from gpt2_repro.data.preparation import writing
from gpt2_repro.data.sources import local_files
local_files.PART_BYTES = 2000
writing.BLOCK_IDS = 400
if __name__ == "__main__":
    cli.run(prepare_data.main)
"""


@pytest.fixture(params=["files", "mixture"])
def start(tmp_path: Path, corpus: list[Path], request: pytest.FixtureRequest) -> Callable[..., subprocess.Popen[str]]:
    """Return a function that starts prepare_data.py in a new process session."""
    story = tmp_path / "story.py"
    story.write_text(STORY, encoding="utf-8")

    def run(name: str, workers: int) -> subprocess.Popen[str]:
        form = ("--tokenizer", "train:300", "--sequence_length", 32, "--split", "hash", "--validation_fraction", 0.1)
        sources = ("--data_files", *corpus)
        if request.param == "mixture":
            sources = ("--source", f"{corpus[0]}=0.6,{corpus[1]}=0.4x2")
        output = ("--dataset_dir", tmp_path / name, "--validation_text", "true")
        words = ("python", story, *form, *sources, *output, "--num_proc", workers)
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return start_command(words, {"PYTHONPATH": str(ROOT)}, **streams)

    return run


def workers_of(process: subprocess.Popen[str]) -> list[int]:
    """Return the running processes in the session of `process`, including orphans."""
    found = []
    for pid in psutil.pids():
        with contextlib.suppress(OSError, psutil.NoSuchProcess):
            if os.getsid(pid) == process.pid and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(pid)
    return found


def assert_no_workers(process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 10
    while workers_of(process) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not workers_of(process), "workers outlive the preparation"


def wait_for(process: subprocess.Popen[str], reached: Callable[[], bool]) -> None:
    while process.poll() is None and not reached():
        time.sleep(0.002)


def test_a_killed_preparation_ends_as_one_that_was_left_alone(start, tmp_path: Path, content) -> None:
    def kill_at(pattern: str, wanted: int) -> None:
        def count() -> int:
            return len(glob.glob(f"{tmp_path}/out.staging/{pattern}"))  # unlike Path.glob, no error for vanished files

        process = start("out", 2)
        wait_for(process, lambda: count() >= wanted)
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        assert_no_workers(process)
        assert not (tmp_path / "out").exists()

    for parts in (1, 15):
        kill_at("streams/train*/*-*.json", parts)
    process = start("out", 2)
    wait_for(process, lambda: len(workers_of(process)) >= 4)
    os.kill(max(workers_of(process)), signal.SIGKILL)  # the newest process is a worker
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 2 and "--num_proc 1" in output and "Traceback" not in output, output
    assert len(glob.glob(f"{tmp_path}/out.staging/streams/train*/*-*.ids")) >= 15
    for shards in (1, 5):
        kill_at("folder/*/data-*.arrow", shards)
    for name in ("out", "alone"):
        process = start(name, 1)
        output = process.communicate(timeout=120)[0]
        assert process.returncode == 0, output
    assert content(tmp_path / "out") == content(tmp_path / "alone")
    assert not (tmp_path / "out.staging").exists()


def test_ctrl_c_ends_workers_in_silence(start, tmp_path: Path) -> None:
    process = start("out", 2)
    wait_for(process, lambda: bool(glob.glob(f"{tmp_path}/out.staging/streams/train*/*-*.json")))
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 130 and "Traceback" not in output, output
    assert_no_workers(process)

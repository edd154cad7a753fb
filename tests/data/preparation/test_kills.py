"""A preparation is killed again and again, by SIGKILL, and ends with the folder of one that was left alone."""

import glob
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds workers by /proc"),
]


ROOT = Path(__file__).parents[3]
# Parts of 2 KB and files of rows of 3 KB, so that a second of work has a hundred places to be killed at.
STORY = """
import sys
import prepare_data
from gpt2_repro import entry
from gpt2_repro.data import shards
from gpt2_repro.data.sources import text_files
text_files.PART_BYTES = 2000
shards.BLOCK_IDS = 400
if __name__ == "__main__":
    entry.run(prepare_data.main)
"""


@pytest.fixture
def prepare(tmp_path: Path, corpus: list[Path]):
    """Starts a preparation in a session of its own."""
    story = tmp_path / "story.py"
    story.write_text(STORY)
    big = tmp_path / "big.jsonl"
    big.write_text("".join(path.read_text() for path in corpus))
    (tmp_path / "small.jsonl").write_text(corpus[0].read_text())

    def start(name: str, *words: object) -> subprocess.Popen[str]:
        form = ("--tokenizer", "train:300", "--sequence_length", 32, "--split", "hash", "--validation_fraction", 0.1)
        files = ("--data_files", tmp_path / "*.jsonl", "--dataset_dir", tmp_path / name, "--validation_text", "true")
        return subprocess.Popen(
            [sys.executable, str(story), *map(str, (*form, *files, *words))],
            env=os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    return start


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def workers_of(process: subprocess.Popen[str]) -> list[int]:
    """Living processes of the session."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except (OSError, ValueError):
            continue
        if entry.name.isdigit() and fields[3] == str(process.pid) and fields[0] != "Z":
            found.append(int(entry.name))
    return found


def assert_no_workers(process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 10
    while workers_of(process) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not workers_of(process), "workers outlive the preparation"


def test_a_killed_preparation_ends_as_one_that_was_left_alone(prepare, tmp_path: Path) -> None:
    alone = prepare("alone", "--num_proc", 1)
    output = alone.communicate(timeout=120)[0]
    assert alone.returncode == 0, output
    source = random.Random(0)
    killed_at: list[str] = []
    for workers, stride in ((1, 25), (5, 45)):
        name = f"killed-{workers}"
        staging, wanted = tmp_path / f"{name}.staging", 0
        while not (tmp_path / name).exists():
            process = prepare(name, "--num_proc", workers)
            # Later in each start: while a tokenizer is trained, parts are staged, rows are written.
            wanted += source.randint(stride - 20, stride)
            while process.poll() is None:
                staged = len(
                    glob.glob(f"{staging}/streams/train-0/*-*.json")
                )  # unlike Path.glob, without an error for what vanishes
                shards = len(glob.glob(f"{staging}/folder/*/data-*.arrow"))
                if staged + shards >= wanted:
                    killed_at.append(f"{staged} parts, {shards} shards")
                    os.kill(process.pid, signal.SIGKILL)
                    process.wait()
                    assert_no_workers(process)
                    assert not (tmp_path / name).exists()
                time.sleep(0.002)
            output = process.communicate()[0]
            assert process.returncode in (0, -signal.SIGKILL), output
        assert content(tmp_path / name) == content(tmp_path / "alone")
        assert not staging.exists()
    assert len(killed_at) >= 5 and any(" 0 shards" not in at for at in killed_at), killed_at
    manifest = json.loads((tmp_path / "alone" / "manifest.json").read_text())
    assert manifest["read"]["documents"] == 173 and len(manifest["shards"]["train"]) > 20


def test_a_killed_worker_ends_the_preparation_and_the_next_start_resumes(prepare, tmp_path: Path) -> None:
    process = prepare("out", "--num_proc", 2)
    while process.poll() is None and len(list(tmp_path.glob("out.staging/streams/train-0/*-*.json"))) < 5:
        time.sleep(0.002)
    os.kill(max(workers_of(process)), signal.SIGKILL)  # the newest: neither the preparation nor the resource tracker
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 2 and "--num_proc 1" in output and "Traceback" not in output, output
    assert len(list(tmp_path.glob("out.staging/streams/train-0/*-*.ids"))) >= 5
    for name in ("out", "alone"):
        resumed = prepare(name, "--num_proc", 1)
        assert resumed.communicate(timeout=120) and not resumed.returncode
    assert content(tmp_path / "out") == content(tmp_path / "alone")


@pytest.mark.parametrize("after", [0, 0.3])
def test_ctrl_c_ends_workers_in_silence_while_they_start(prepare, after: float) -> None:
    process = prepare("out", "--num_proc", 2)
    while process.poll() is None and len(workers_of(process)) < 4:  # beside the preparation and the resource tracker
        time.sleep(0.002)
    time.sleep(after)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 130 and "Traceback" not in output, output
    assert_no_workers(process)

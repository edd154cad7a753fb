"""A sum over real processes (gloo): right and hanging; what else processes can say is judged from their words."""

from pathlib import Path

import pytest

from gpt2_repro.preflight import all_reduce
from gpt2_repro.preflight.all_reduce import check_all_reduce


ABSENT = """
import os, time
from gpt2_repro.preflight import all_reduce
if os.environ["RANK"] == "1":
    all_reduce._answer(started=1)
    time.sleep(600)  # a process that never joins
all_reduce.measure()
"""
WRONG = """
import os
import torch.distributed as dist
from gpt2_repro.preflight import all_reduce
honest = dist.all_reduce
def corrupt(numbers):
    honest(numbers)
    numbers[5] += 1
dist.all_reduce = corrupt
all_reduce.measure()
"""


def test_processes_that_reach_each_other() -> None:
    found = check_all_reduce(2, seconds=120)
    assert found.mark == "✓" and "GB/s" in found.words


@pytest.mark.parametrize(
    ("script", "processes", "words"),
    [
        (ABSENT, 2, "3 s"),
        (WRONG, 1, "rank 0"),
    ],
)
def test_what_goes_wrong_is_told(script: str, processes: int, words: str, tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "worker.py"
    path.write_text(script)
    monkeypatch.setenv("PYTHONPATH", str(Path(all_reduce.__file__).parents[2]))
    found = check_all_reduce(processes, seconds=3, command=[str(path)])
    assert found.mark == "✗" and words in found.words


@pytest.mark.parametrize(
    ("code", "said", "words"),
    [
        (None, '{"started": 0}\n', "120 s"),
        # What was said before it hung counts.
        (None, '{"started": 0}\n{"started": 1}\n{"rank": 1, "wrong": 7}\n', "rank 1"),
        (1, "Traceback\nRuntimeError: invalid device ordinal\n====\n", "RuntimeError: invalid device ordinal"),
    ],
)
def test_what_processes_say_is_judged(code: int | None, said: str, words: str, monkeypatch) -> None:
    monkeypatch.setattr(all_reduce, "run_to_end", lambda command, too_long, environment: (code, said))
    monkeypatch.setattr(all_reduce.shutil, "which", lambda name: None)
    found = check_all_reduce(2, seconds=30)
    assert found.mark == "✗" and words in found.words


def test_time_is_counted_from_when_all_are_there(monkeypatch) -> None:
    def run(command, too_long, environment) -> tuple[None, str]:
        one, both = '{"started": 0}\n', '{"started": 0}\n{"started": 1}\n'
        assert not too_long(one, 100.0) and too_long(one, 121.0)
        assert not too_long(both, 110.0) and not too_long(both, 139.0) and too_long(both, 141.0)
        return None, both

    monkeypatch.setattr(all_reduce, "run_to_end", run)
    monkeypatch.setattr(all_reduce.shutil, "which", lambda name: None)
    assert "30 s" in check_all_reduce(2, seconds=30).words


def test_gpus_are_asked_again_without_peer_to_peer(monkeypatch) -> None:
    def run(command, too_long, environment) -> tuple[int, str]:
        mended = environment == {"NCCL_P2P_DISABLE": "1"}
        return (0, '{"gigabytes_per_second": 9.5}\n') if mended else (3, '{"rank": 0, "wrong": 1}\n')

    monkeypatch.setattr(all_reduce, "run_to_end", run)
    monkeypatch.setattr(all_reduce.shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    found = check_all_reduce(2, seconds=30)
    assert found.mark == "✗" and "NCCL_P2P_DISABLE=1" in found.words

"""A sum over real processes (gloo): right, hanging, wrong."""

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
NEVER = """
import os, time
if os.environ["RANK"] == "1":
    time.sleep(600)  # a process that does not even start
from gpt2_repro.preflight import all_reduce
all_reduce.measure()
"""
WRONG = """
import os
import torch.distributed as dist
from gpt2_repro.preflight import all_reduce
honest = dist.all_reduce
def corrupt(numbers):
    honest(numbers)
    if os.environ["RANK"] == "1":
        numbers[5] += 1
dist.all_reduce = corrupt
all_reduce.measure()
"""


def test_processes_that_reach_each_other() -> None:
    found = check_all_reduce(2, seconds=120)
    assert found.mark == "✓" and found.words.endswith("GB/s, every number right")


@pytest.mark.parametrize(
    ("script", "seconds", "words"),
    [
        (ABSENT, 3, "nothing came back in 3 s: the processes do not reach each other"),
        (NEVER, 3, "of the processes did not start in 8 s"),
        (WRONG, 30, "rank 1 has 1 wrong numbers"),
        ("raise ValueError('invalid device ordinal')", 30, "no sum (ValueError: invalid device ordinal)"),
    ],
)
def test_what_goes_wrong_is_told(script: str, seconds: float, words: str, tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "worker.py"
    path.write_text(script)
    monkeypatch.setenv("PYTHONPATH", str(Path(all_reduce.__file__).parents[2]))
    monkeypatch.setattr(all_reduce, "STARTING", 8.0 if script == NEVER else 60.0)
    found = check_all_reduce(2, seconds=seconds, command=[str(path)])
    assert found.mark == "✗" and words in found.words

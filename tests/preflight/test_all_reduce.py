"""A sum over processes (gloo): right, wrong and hanging, and what is said about it."""

from pathlib import Path

import pytest
import torch.distributed as dist

from gpt2_repro.preflight import all_reduce
from gpt2_repro.preflight.all_reduce import check_all_reduce


# Rank 1 never takes part.
ABSENT = """
import os, sys, time
import torch.distributed as dist
from gpt2_repro.preflight import all_reduce
if os.environ["RANK"] == "1":
    dist.init_process_group("gloo")
    time.sleep(600)
all_reduce.measure(float(sys.argv[1]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("script", "mark", "words"), [(None, "✓", "GB/s"), (ABSENT, "✗", "within 3 s")])
def test_two_processes(script: str | None, mark: str, words: str, tmp_path: Path, monkeypatch) -> None:
    if script:
        (tmp_path / "worker.py").write_text(script)
        monkeypatch.setattr(all_reduce, "WORKER", [str(tmp_path / "worker.py")])
    monkeypatch.setenv("PYTHONPATH", str(Path(all_reduce.__file__).parents[2]))
    found = check_all_reduce(2, seconds=3 if script else 120)
    assert found.mark == mark and words in found.words


def test_every_number_is_compared(monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1), ("MASTER_PORT", 0)):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setattr(all_reduce, "NUMBERS", 100)
    monkeypatch.setattr(dist, "all_reduce", lambda numbers: numbers[5].add_(1))
    monkeypatch.setattr(all_reduce, "_fail", print)
    all_reduce.measure(60)
    assert "rank 0 has 1 wrong numbers" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("code", "said", "words"),
    [
        (None, "", "150 s"),
        (3, "0.3 GB/s\nerror: rank 1 has 7 wrong numbers: x\n====\n", "rank 1"),
        (1, "Traceback\nRuntimeError: invalid device ordinal\n====\nRoot Cause:\n", "RuntimeError: invalid device"),
        (1, "[rank1]: torch.OutOfMemoryError: CUDA\ntraceback : To enable traceback see\n", "[rank1]: torch.OutOf"),
        (1, "step 1\nstep 2\n----\n", "step 2"),
        (1, "", "no output"),
    ],
)
@pytest.mark.parametrize("works_without_p2p", [None, False, True])
def test_what_processes_say_is_judged(
    code: int | None, said: str, words: str, works_without_p2p: bool | None, monkeypatch
) -> None:
    """`works_without_p2p` is None if there is no GPU."""

    def run(command, seconds, variables) -> tuple[int | None, str]:
        mended = works_without_p2p and variables == {"NCCL_P2P_DISABLE": "1"}
        return (0, "9.5 GB/s\n") if mended else (code, said)

    monkeypatch.setattr(all_reduce, "run_to_end", run)
    monkeypatch.setattr(all_reduce.shutil, "which", lambda name: works_without_p2p is not None)
    found = check_all_reduce(2, seconds=30)
    assert found.mark == "✗" and words in found.words
    assert ("NCCL_P2P_DISABLE=1" in found.words) is bool(works_without_p2p)

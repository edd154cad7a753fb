"""Fixtures that train with injected faults."""

import fcntl
import functools
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.commands import kill_all
from tests.faults.runs import Started, results


@pytest.fixture(scope="session")
def golden(train, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that trains without faults and returns the run directory.

    Runs with equal options are trained only once.
    """
    folder = tmp_path_factory.mktemp("golden")

    @functools.cache
    def run(*options: object, launcher: tuple[object, ...] = ("python",)) -> Path:
        return train(folder / str(len(list(folder.iterdir()))), *options, launcher=launcher)

    return run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return the path of a new run directory."""
    return tmp_path / "run"


@pytest.fixture
def resumes_exactly(train, golden) -> Callable[..., None]:
    """Return a function that resumes a run, and compares it with a run without faults."""

    def resume(run: Path, *options: object, launcher: tuple[object, ...] = ("python",)) -> None:
        train(run, *options, launcher=launcher)
        assert results(run) == results(golden(*options, launcher=launcher))

    return resume


@pytest.fixture
def start(tiny_recipe: Path, tmp_path: Path) -> Iterator[Callable[..., Started]]:
    """Return a function that starts a run of the tiny recipe in the background.

    The function's argument `fault` is None, or a tuple of fault name, step(s) and rank.
    """
    started: list[Started] = []

    def begin(
        run: Path, *options: object, launcher=("python",), fault=None, log: str = "run.log", warm=False, **env: str
    ) -> Started:
        script, mark = "train.py", tmp_path / "mark"
        if fault is not None:
            mark.unlink(missing_ok=True)
            name, at, rank = fault
            env |= {"FAULT": name, "FAULT_AT": str(at), "FAULT_RANK": str(rank), "FAULT_MARK": str(mark)}
            script, warm = "tests/faults/faulty_train.py", True
        words = (*launcher, script, tiny_recipe, "--output_dir", run, "--disable_tqdm", "true", *options)
        started.append(Started(words, run, log, env, warm=warm, mark=mark))
        return started[-1]

    yield begin
    for command in started:
        kill_all(command.process.pid)
        command.process.wait()


@pytest.fixture
def fault(start) -> Callable[..., tuple[int, str]]:
    """Return a function that runs train.py with a fault.

    The function waits until train.py and its writer end, and returns the exit code and the output of train.py.
    """

    def run(name: str, at: object, run_directory: Path, *options: object, rank: int = 0, **settings: Any):
        command = start(run_directory, *options, fault=(name, at, rank), **settings)
        code = command.end()
        with (run_directory / ".lock").open(encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the writer may still write the last checkpoint
        assert command.mark.is_file(), f"The fault {name} did not happen: {command.text()[-3000:]}"
        return code, command.text()

    return run


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 16 MB; skip the test if mounting fails."""
    folder = tmp_path / "disk"
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", folder]
    mounted = subprocess.run(words, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"Mounting a small disk needs root: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)

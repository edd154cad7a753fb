"""Runs to do harm to."""

import functools
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.commands import kill_all
from tests.faults.runs import Started


FAULTY = "tests/faults/faulty_train.py"


@pytest.fixture(scope="session")
def golden(train, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A run of these options that nothing happened to; trained once in a session."""
    folder = tmp_path_factory.mktemp("golden")

    @functools.cache
    def run(*options: object, launcher: tuple[object, ...] = ("python",)) -> Path:
        return train(folder / str(len(list(folder.iterdir()))), *options, launcher=launcher)

    return run


@pytest.fixture
def start(tiny_recipe: Path) -> Iterator[Callable[..., Started]]:
    """Starts the tiny recipe in a run directory; whatever is left of it is killed at the end of the test."""
    started: list[Started] = []

    def begin(
        run: Path,
        *options: object,
        launcher: tuple[object, ...] = ("python",),
        script: str = "train.py",
        log: str = "run.log",
        warm: bool = False,
        **env: str,
    ) -> Started:
        words = (*launcher, script, tiny_recipe, "--output_dir", run, "--disable_tqdm", "true", *options)
        started.append(Started(words, run, log, env, warm=warm))
        return started[-1]

    yield begin
    for command in started:
        kill_all(command.process.pid)
        command.process.wait()


@pytest.fixture
def fault(start, tmp_path: Path) -> Callable[..., tuple[int, str]]:
    """Runs train.py with a fault to its end; returns exit code and output. Fails where the fault did not happen."""

    def run(name: str, at: object, run_directory: Path, *options: object, rank: int = 0, **settings: Any):
        mark = tmp_path / "mark"
        mark.unlink(missing_ok=True)
        environment = {"FAULT": name, "FAULT_AT": str(at), "FAULT_RANK": str(rank), "FAULT_MARK": str(mark)}
        command = start(run_directory, *options, script=FAULTY, warm=True, **settings, **environment)
        code = command.end()
        assert mark.is_file(), f"{name} did not happen: {command.text()[-3000:]}"
        return code, command.text()

    return run


@pytest.fixture
def small_disk(tmp_path: Path):
    """A disk of 6 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", folder], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"a small disk needs root: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)

"""WB: a tracking service that fails, vanishes or is absent does not end a training."""

import contextlib
import shutil
from pathlib import Path

import psutil
import pytest

from tests.faults.runs import fill, losses


pytestmark = pytest.mark.faults


def test_a_service_that_dies_is_left_out_and_the_run_goes_on(start, golden, tmp_path: Path) -> None:
    """WB3."""
    run = tmp_path / "run"
    options = ("--max_steps", 400, "--eval_steps", 100)
    command = start(run, *options, "--report_to", "wandb", WANDB_MODE="offline", HOME=str(tmp_path), warm=True)

    def service() -> list[psutil.Process]:
        found = []
        for process in psutil.Process(command.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if "wandb-core" in " ".join(process.cmdline()):
                    found.append(process)
        return found

    command.wait_until(lambda: command.step() >= 5)
    (core,) = service()
    core.kill()
    assert command.end() == 0, command.text()
    assert "WandbCallback failed in on_log" in command.text() and "it is disabled from now on" in command.text()
    assert losses(run) == losses(golden(*options))


def test_a_full_disk_of_the_service_costs_no_line_of_the_log(start, golden, small_disk: Path, tmp_path: Path) -> None:
    """WB5: wandb says nothing of it; metrics.jsonl is the truth."""
    run = tmp_path / "run"
    options = ("--max_steps", 400, "--eval_steps", 100)
    places = {"WANDB_MODE": "offline", "WANDB_DIR": str(small_disk), "HOME": str(tmp_path)}
    command = start(run, *options, "--report_to", "wandb", warm=True, **places)
    command.wait_until(lambda: command.step() >= 5)
    fill(small_disk, leave=0)
    assert command.end() == 0, command.text()
    assert list(small_disk.glob("wandb/offline-run-*")) and shutil.disk_usage(small_disk).free == 0
    assert losses(run) == losses(golden(*options))

"""The training continues if an experiment tracker such as wandb fails."""

import contextlib
from pathlib import Path

import psutil
import pytest

from tests.faults.runs import losses


pytestmark = pytest.mark.faults


def test_a_service_that_dies_is_disabled_and_the_run_continues(start, golden, tmp_path: Path) -> None:
    """If the wandb process is killed, the training disables wandb and completes."""
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

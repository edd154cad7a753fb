"""A folder that cannot be deleted costs a warning, and no save, copy or final model."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpt2_repro.checkpoints.manifest import defect
from gpt2_repro.checkpoints.place import Place
from gpt2_repro.checkpoints.rotation import newest_step
from tests.faults.runs import status


pytestmark = pytest.mark.faults

OPTIONS = ("--save_steps", 2, "--keep_checkpoints", 1, "--keep_best_checkpoint", "false")


def protect_by_mount(folder: Path) -> list[str]:
    subprocess.run(["mount", "--bind", folder, folder], check=True)
    return ["umount", "--lazy", str(folder)]


def protect_by_flag(folder: Path) -> list[str]:
    subprocess.run(["chattr", "-R", "+i", folder], check=True)
    return ["chattr", "-R", "-i", str(folder)]


@pytest.fixture(params=[protect_by_mount, protect_by_flag])
def protect(request) -> Iterator:
    """Return a function that makes a folder a mount point, or immutable; skip the test if that fails."""
    undo: list[list[str]] = []

    def run(folder: Path) -> None:
        try:
            undo.append(request.param(folder))
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"{request.param.__name__} needs root and a file system that supports it: {error}")

    run.is_mount = request.param is protect_by_mount  # type: ignore[attr-defined]
    yield run
    for command in undo:
        subprocess.run(command, check=True)


def test_a_checkpoint_that_cannot_be_deleted_does_not_end_the_run(protect, start, train, run: Path) -> None:
    train(run, *OPTIONS, "--stop_at_step", 2)
    protect(run / "checkpoint-2")
    command = start(run, *OPTIONS, warm=True)
    assert command.end() == 0, command.text()
    assert status(run)["state"] == "complete" and newest_step(run) == 8
    assert command.text().count("cannot be deleted") == 1
    assert {path.name for path in run.glob("checkpoint-*")} == {"checkpoint-2", "checkpoint-8"}


def test_a_final_model_that_cannot_be_deleted(protect, start, train, run: Path) -> None:
    """An extended run replaces the content of a mount point, and names an immutable folder."""
    train(run, *OPTIONS)
    protect(run / "final")
    command = start(run, *OPTIONS, "--max_steps", 12, "--allow_resume_change", warm=True)
    code = command.end()
    assert newest_step(run) == 12
    if protect.is_mount:
        assert code == 0, command.text()
        assert status(run)["state"] == "complete" and defect(run / "final", read_files=True) is None
    else:
        assert code == 2 and f"{run}/final" in command.text()  # a supervisor does not repeat it


def test_a_copy_that_cannot_be_deleted_does_not_end_the_copies(protect, start, train, run: Path, tmp_path) -> None:
    place = tmp_path / "place"
    train(run, *OPTIONS, "--stop_at_step", 2, "--sync_to", place)
    protect(place / "checkpoint-2")
    command = start(run, *OPTIONS, "--sync_to", place, warm=True)
    assert command.end() == 0, command.text()
    assert "NOT COPIED" not in command.text() and command.text().count("cannot be deleted") == 1
    copies = Place(str(place))
    assert copies.manifest("checkpoint-8") and copies.manifest("final")

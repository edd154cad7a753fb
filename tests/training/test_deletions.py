"""A deletion that fails is one warning: saves, copies and the final model go on."""

import errno
import os
from pathlib import Path

import pytest
from fsspec.implementations.local import LocalFileSystem

from gpt2_repro.checkpoints import copying, rotation
from gpt2_repro.checkpoints.manifest import defect, read_manifest
from gpt2_repro.checkpoints.place import Place
from gpt2_repro.checkpoints.resuming import RunIdentity
from gpt2_repro.checkpoints.rotation import (
    complete_checkpoints,
    newest_complete,
    newest_step,
    publish,
    rotate,
    set_aside,
    sweep,
)
from gpt2_repro.errors import UserError
from gpt2_repro.run_record.layout import Rotation
from tests.training.test_copying import Objects, copy, place, restore, run, save, steps_at  # noqa: F401 (fixtures)


# A folder of a container's image, a mount point, an immutable folder, no permission, left-over files on NFS.
ERRORS = [errno.EXDEV, errno.EBUSY, errno.EPERM, errno.EACCES, errno.ENOTEMPTY]


def fail_for(monkeypatch: pytest.MonkeyPatch, number: int, folder: str, *functions: str) -> None:
    """Let functions of `os` fail for all paths in a folder of this name."""
    for name in functions:
        original = getattr(os, name)

        def call(path, *args, original=original, dir_fd=None, **kwargs):
            whole = Path(path)
            if dir_fd is not None:  # as shutil.rmtree calls it
                whole = Path(f"/proc/self/fd/{dir_fd}").readlink() / path
                kwargs["dir_fd"] = dir_fd
            if folder in whole.parts:
                raise OSError(number, os.strerror(number), str(path))
            return original(path, *args, **kwargs)

        monkeypatch.setattr(os, name, call)


def steps(run: Path) -> list[int]:  # noqa: F811
    return sorted(int(path.name.rpartition("-")[2]) for path in complete_checkpoints(run))


@pytest.fixture(autouse=True)
def _forget_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rotation, "_warned", set())
    monkeypatch.setattr(copying, "_kept", set())


@pytest.mark.parametrize("number", ERRORS)
def test_a_checkpoint_that_cannot_be_renamed_is_deleted_in_place(number: int, tmp_path, monkeypatch) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    fail_for(monkeypatch, number, "checkpoint-1", "rename")
    rotate(tmp_path, Rotation(2))
    assert steps(tmp_path) == [2, 3] and not (tmp_path / "checkpoint-1").exists()


@pytest.mark.parametrize("number", ERRORS)
def test_a_checkpoint_that_stays_is_one_warning_and_changes_no_other(
    number: int, tmp_path, monkeypatch, caplog
) -> None:
    save(tmp_path, 1)
    fail_for(monkeypatch, number, "checkpoint-1", "rename", "unlink", "rmdir")
    for step in range(2, 7):
        save(tmp_path, step)
        rotate(tmp_path, Rotation(2))
        assert steps(tmp_path) == [1, *range(max(2, step - 1), step + 1)]
    assert len(caplog.records) == 1 and "checkpoint-1" in caplog.text
    assert newest_complete(tmp_path) == (tmp_path / "checkpoint-6", [])


def test_a_manifest_that_cannot_be_read_is_a_warning(tmp_path: Path, monkeypatch, caplog) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    read = rotation.read_manifest

    def refuse(path: Path) -> dict:
        if path.name == "checkpoint-1":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return read(path)

    monkeypatch.setattr(rotation, "read_manifest", refuse)
    rotate(tmp_path, Rotation(2))
    assert steps(tmp_path) == [1, 2, 3]
    assert "checkpoint-1" in caplog.text


def test_a_checkpoint_of_which_a_part_stays_is_not_complete(tmp_path: Path, monkeypatch, caplog) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    fail_for(monkeypatch, errno.EPERM, "shards", "unlink", "rmdir")
    rotate(tmp_path, Rotation(1))
    sweep(tmp_path)
    assert steps(tmp_path) == [2] and len(caplog.records) == 1
    assert [path.name for path in tmp_path.glob("trash-*")] == ["trash-checkpoint-1"]
    save(tmp_path, 1)  # the run went back
    rotate(tmp_path, Rotation(1))
    assert steps(tmp_path) == [2]


@pytest.mark.parametrize("number", ERRORS)
def test_a_final_model_is_replaced_in_place(number: int, tmp_path: Path, monkeypatch) -> None:
    for step in (1, 2):
        save(tmp_path, step)
    publish(tmp_path / "checkpoint-1", tmp_path / "final")
    original = os.rename

    def rename(source, target, **kwargs) -> None:
        if Path(source) == tmp_path / "final":
            raise OSError(number, os.strerror(number))
        original(source, target, **kwargs)

    monkeypatch.setattr(os, "rename", rename)
    expected = read_manifest(tmp_path / "checkpoint-2")
    publish(tmp_path / "checkpoint-2", tmp_path / "final")
    assert defect(tmp_path / "final", read_files=True) is None
    assert read_manifest(tmp_path / "final") == expected


def test_a_final_model_that_is_a_mount_point_is_replaced(tmp_path: Path, monkeypatch) -> None:
    for step in (1, 2):
        save(tmp_path, step)
    expected = read_manifest(tmp_path / "checkpoint-2")
    publish(tmp_path / "checkpoint-1", tmp_path / "final")
    original = os.rename

    def rename(source, target, **kwargs) -> None:
        if tmp_path / "final" in (Path(source), Path(target)):
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        original(source, target, **kwargs)

    remove = os.rmdir
    monkeypatch.setattr(os, "rename", rename)
    monkeypatch.setattr(os, "rmdir", lambda path, **kwargs: Path(path) == tmp_path / "final" or remove(path, **kwargs))
    publish(tmp_path / "checkpoint-2", tmp_path / "final")
    assert defect(tmp_path / "final", read_files=True) is None
    assert read_manifest(tmp_path / "final") == expected and not (tmp_path / "checkpoint-2").exists()


def test_a_final_model_that_stays_is_named(tmp_path: Path, monkeypatch) -> None:
    for step in (1, 2):
        save(tmp_path, step)
    publish(tmp_path / "checkpoint-1", tmp_path / "final")
    fail_for(monkeypatch, errno.EPERM, "final", "rename", "unlink", "rmdir")
    with pytest.raises(UserError, match="final"):
        publish(tmp_path / "checkpoint-2", tmp_path / "final")
    assert steps(tmp_path) == [2]


@pytest.mark.parametrize("number", ERRORS)
def test_a_checkpoint_that_cannot_be_set_aside_is_never_chosen(number: int, tmp_path: Path, monkeypatch) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    original = Path.rename

    def rename(path: Path, target: Path) -> Path:
        if path.name == "checkpoint-3":
            raise OSError(number, os.strerror(number))
        return original(path, target)

    monkeypatch.setattr(Path, "rename", rename)
    set_aside(tmp_path, after=1)
    assert steps(tmp_path) == [1] and (tmp_path / "checkpoint-3" / "config.json").is_file()
    assert {path.name for path in tmp_path.glob("abandoned-*")} == {"abandoned-checkpoint-2"}


@pytest.fixture
def _refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self, path: str) -> None:
        raise PermissionError("Access Denied (403)")

    for system in (Objects, LocalFileSystem):
        monkeypatch.setattr(system, "rm_file", refuse)


@pytest.mark.usefixtures("_refuses")
def test_copies_go_on_at_a_place_without_the_right_to_delete(run: Path, place: str, caplog) -> None:  # noqa: F811
    for step in (2, 4, 6, 8):
        save(run, step)
        assert copy(run, step, place) > 0  # keeps two
    save(run, 10)
    publish(run / "checkpoint-10", run / "final")
    assert copying.copy(Place(place), str(run), "final", Rotation(2), RunIdentity({"seed": 1})) > 0
    assert steps_at(place) == [8, 6, 4, 2] and Place(place).manifest("final")
    refused = [record.getMessage().split()[0] for record in caplog.records]
    assert sorted(refused) == ["checkpoint-2", "checkpoint-4"]


@pytest.mark.usefixtures("_refuses")
def test_a_restore_does_not_choose_a_copy_that_should_be_deleted(run: Path, place: str, tmp_path: Path) -> None:  # noqa: F811
    for step in (2, 4, 6):
        save(run, step)
        copy(run, step, place)
    set_aside(run, after=2)
    save(run, 3)
    copy(run, 3, place)
    assert steps_at(place) == [3, 2]
    assert newest_step(restore(tmp_path / "restored", place).path) == 3
    save(run, 4)
    copy(run, 4, place)  # an interrupted or earlier copy of the same step is replaced
    assert steps_at(place) == [4, 3, 2]

"""Room on the disks of a machine."""

import shutil
from pathlib import Path

import pytest

from gpt2_repro.preflight.disks import Need, check_room


def test_needs_on_one_disk_are_added(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    one, other = Need("data", tmp_path / "not" / "there", 0.6 * free), Need("the run", tmp_path / "run", 0.6 * free)
    assert [found.mark for found in check_room([one])] == ["✓"]
    (both,) = check_room([one, other])
    assert both.mark == "✗" and str(one.folder) in both.words and str(other.folder) in both.words
    elsewhere = Need("the run", Path("/dev/shm"), 1e18)
    assert [found.mark for found in check_room([one, elsewhere])] == ["✓", "✗"]


def test_the_room_of_a_rented_volume_is_what_its_files_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data.bin").write_bytes(b"x" * 3_000_000)
    (tmp_path / "again.bin").hardlink_to(tmp_path / "data.bin")
    with (tmp_path / "holes.bin").open("wb") as file:
        file.truncate(10**12)
    monkeypatch.setattr(Path, "is_mount", lambda path: path == tmp_path)
    linked = tmp_path.with_name(tmp_path.name + "-link")
    linked.symlink_to(tmp_path)
    # The disk has room; the volume as it was rented does not. Another disk is judged by itself.
    here, there = Need("data", linked, 8e6), Need("the run", Path("/dev/shm"), 8e6)
    small, other = check_room([here, there], volume_bytes=10_000_000)
    assert small.mark == "✗" and other.mark == "✓"
    assert check_room([here._replace(bytes=6e6)], volume_bytes=10_000_000)[0].mark == "✓"


def test_a_path_that_cannot_be_a_folder_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for folder in (file, file / "below"):
        (found,) = check_room([Need("data", folder, 1)])
        assert found.mark == "✗" and str(folder) in found.words

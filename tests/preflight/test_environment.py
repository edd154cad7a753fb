"""Preflight checks a machine's packages, shared memory, open-file limit and disks."""

import shutil
from pathlib import Path

import pytest

from gpt2_repro.preflight.environment import Need, check_room


def test_needs_on_one_disk_are_added(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    one, other = Need("data", tmp_path / "not" / "there", 0.6 * free), Need("the run", tmp_path / "run", 0.6 * free)
    assert [finding.mark for finding in check_room([one])] == ["✓"]
    (both,) = check_room([one, other])
    assert both.mark == "✗" and str(one.folder) in both.text and str(other.folder) in both.text
    (tmp_path / "file").touch()
    assert [finding.mark for finding in check_room([Need("data", tmp_path / "file" / "below", 1)])] == ["✗"]


def test_the_room_of_a_rented_volume_is_what_its_files_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data.bin").write_bytes(b"x" * 3_000_000)
    with (tmp_path / "holes.bin").open("wb") as file:
        file.truncate(10**12)
    monkeypatch.setattr(Path, "is_mount", lambda path: path == tmp_path)
    # The data's disk has enough free space, but the rented volume has not. The size of the volume does not apply to
    # the run, which is on another disk.
    data, run = Need("data", tmp_path, 8e6), Need("the run", Path("/dev/shm"), 8e6)
    assert [finding.mark for finding in check_room([data, run], volume_bytes=10_000_000)] == ["✗", "✓"]
    assert check_room([data._replace(bytes=6e6)], volume_bytes=10_000_000)[0].mark == "✓"

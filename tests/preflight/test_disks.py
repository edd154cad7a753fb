"""Room and speed of the disks of a machine."""

import re
import shutil
from pathlib import Path

import pytest

from gpt2_repro.preflight import disks
from gpt2_repro.preflight.disks import Need, check_room, check_speed, check_speeds


def test_what_comes_to_one_disk_is_added_up(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    one, other = Need("data", tmp_path / "not" / "there", 0.6 * free), Need("the run", tmp_path / "run", 0.6 * free)
    assert [found.mark for found in check_room([one])] == ["✓"]
    (both,) = check_room([one, other])
    assert both.mark == "✗" and "of data" in both.words and "of the run" in both.words
    elsewhere = Need("the run", Path("/dev/shm"), 1e18)
    assert [found.mark for found in check_room([one, elsewhere])] == ["✓", "✗"]


def test_room_of_a_rented_volume_is_what_is_left_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data.bin").write_bytes(b"x" * 3_000_000)
    (tmp_path / "again.bin").hardlink_to(tmp_path / "data.bin")
    with (tmp_path / "holes.bin").open("wb") as file:
        file.truncate(10**12)
    (tmp_path / "gone").symlink_to(tmp_path / "nothing")
    monkeypatch.setattr(disks, "_mount", lambda path: tmp_path)
    disks._used_bytes.cache_clear()
    assert disks._used_bytes(tmp_path) == pytest.approx(3_000_000, rel=0.01)
    # The disk has room for it, the volume as it was rented has not; another disk is what it says.
    linked = tmp_path.with_name(tmp_path.name + "-link")
    linked.symlink_to(tmp_path)
    here, there = Need("data", linked, 8e6), Need("the run", Path("/dev/shm"), 8e6)
    (small, other) = check_room([here, there], volume_bytes=10_000_000)
    assert small.mark == "✗" and "rent a larger one" in small.words and other.mark == "✓"
    assert check_room([here._replace(bytes=6e6)], volume_bytes=10_000_000)[0].mark == "✓"
    assert not disks._of(Path("/proc").stat().st_dev, tmp_path) and not disks._of(0, tmp_path / "nothing")


def test_speed_is_measured_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disks, "PROBE_BYTES", 2**23)
    found = check_speed(tmp_path / "not" / "there")
    writes, reads = (float(number.replace(",", "")) for number in re.findall(r"([\d,]+) ", found.words)[:2])
    assert writes > 0 and reads > 0 and list(tmp_path.iterdir()) == []
    monkeypatch.setattr(disks, "SLOW", 0)
    places = (tmp_path / "data", tmp_path / "runs", Path("/dev/shm"))
    assert [found.words.split(" in ")[1] for found in check_speeds(places)] == [str(tmp_path), "/dev/shm"]
    monkeypatch.setattr(disks, "SLOW", 1e15)
    assert check_speed(tmp_path).mark == "!"


def test_a_folder_that_cannot_be_one_is_in_the_way(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for folder in (file, file / "below"):
        found = check_speed(folder)
        assert found.mark == "✗" and "name another folder" in found.words
    assert check_speed(Path("/proc/none")).mark == "✗"

"""Driver, limits, disks and secrets of a machine."""

import os
import re
import shutil
from pathlib import Path

import pytest

from gpt2_repro.preflight import environment
from gpt2_repro.preflight.environment import (
    Need,
    check_driver,
    check_limits,
    check_python,
    check_room,
    check_secrets,
    check_speed,
    check_speeds,
)


@pytest.mark.parametrize(
    ("driver", "cuda", "mark", "words"),
    [
        ("580.65.06", "13.0", "✓", "580.65.06 runs CUDA 13.0"),
        ("570.133.20", "13.0", "✗", "CUDA 13.0, which needs 580 or newer"),
        ("535.104", "12.8", "✓", "runs CUDA 12.8"),
        ("470.1", "12.1", "✗", "needs 525 or newer"),
        ("580.1", None, "✗", "built without CUDA"),
        (None, None, "!", "no NVIDIA device"),
        ("unknown", "13.0", "!", "not known to this table"),
        ("999.1", "27.0", "!", "not known to this table"),
    ],
)
def test_the_driver_against_cuda(driver: str | None, cuda: str | None, mark: str, words: str) -> None:
    found = check_driver(driver, cuda)
    assert found.mark == mark and words in found.words


def test_a_device_that_computes_is_not_in_the_way() -> None:
    assert check_driver("570.133.20", "13.0", usable=True).mark == "!"


def test_packages_against_what_is_asked_for(tmp_path: Path) -> None:
    root = Path(environment.__file__).parents[2]
    found = check_python(root / "requirements.txt")
    assert {finding.mark for finding in found} == {"✓"} and len(found) == 1 + len(environment.PACKAGES)
    asked = tmp_path / "requirements.txt"
    asked.write_text(
        "# a comment\ntorch>=99,<=100\ntransformers==1.0\ntqdm<=1.0  # of no interest while it fits\n"
        "no-such-package==2.0\nnothing-of-linux; sys_platform == 'win32'\npyyaml>=5\n"
    )
    marks = {finding.about: (finding.mark, finding.words) for finding in check_python(asked)}
    assert marks.pop("python")[0] == "✓" and marks.pop("torch")[0] == "✗"
    assert marks == {
        "transformers": ("!", marks["transformers"][1]),
        "tqdm": ("!", marks["tqdm"][1]),
        "no-such-package": ("✗", "is not installed: pip install -r requirements.txt"),
    }
    assert marks["transformers"][1].endswith("tested with 1.0") and marks["tqdm"][1].endswith("tested with <=1.0")
    assert [finding.about for finding in check_python(tmp_path / "none")] == ["python"]


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
    monkeypatch.setattr(environment, "_mount", lambda path: tmp_path)
    environment._used_bytes.cache_clear()
    assert environment._used_bytes(tmp_path) == pytest.approx(3_000_000, rel=0.01)
    # The disk has room for it, the volume as it was rented has not; another disk is what it says.
    linked = tmp_path.with_name(tmp_path.name + "-link")
    linked.symlink_to(tmp_path)
    here, there = Need("data", linked, 8e6), Need("the run", Path("/dev/shm"), 8e6)
    (small, other) = check_room([here, there], volume_bytes=10_000_000)
    assert small.mark == "✗" and "rent a larger one" in small.words and other.mark == "✓"
    assert check_room([here._replace(bytes=6e6)], volume_bytes=10_000_000)[0].mark == "✓"
    assert not environment._of(Path("/proc").stat().st_dev, tmp_path) and not environment._of(0, tmp_path / "nothing")


def test_speed_is_measured_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "PROBE_BYTES", 2**23)
    found = check_speed(tmp_path / "not" / "there")
    writes, reads = (float(number.replace(",", "")) for number in re.findall(r"([\d,]+) ", found.words)[:2])
    assert writes > 0 and reads > 0 and list(tmp_path.iterdir()) == []
    monkeypatch.setattr(environment, "SLOW", 0)
    places = (tmp_path / "data", tmp_path / "runs", Path("/dev/shm"))
    assert [found.words.split(" in ")[1] for found in check_speeds(places)] == [str(tmp_path), "/dev/shm"]
    monkeypatch.setattr(environment, "SLOW", 1e15)
    assert check_speed(tmp_path).mark == "!"


def test_a_folder_that_cannot_be_one_is_in_the_way(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for folder in (file, file / "below"):
        found = check_speed(folder)
        assert found.mark == "✗" and "name another folder" in found.words
    assert check_speed(Path("/proc/none")).mark == "✗"


def test_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "LEAST_SHARED_MEMORY", 1)
    monkeypatch.setattr(environment.resource, "getrlimit", lambda which: (65536, 65536))
    assert [finding.mark for finding in check_limits(tmp_path)] == ["✓", "✓"]
    monkeypatch.setattr(environment, "LEAST_SHARED_MEMORY", 1e18)
    shared, files = check_limits(tmp_path)
    assert shared.mark == "✗" and "--shm-size" in shared.words
    monkeypatch.setattr(environment.resource, "getrlimit", lambda which: (1024, 4096))
    assert check_limits(tmp_path)[1].mark == "!" and files.about == "open files"


def test_secrets_are_named_and_never_shown() -> None:
    found = check_secrets({"HF_TOKEN": "hf_abcdef", "RUNPOD_API_KEY": "", "PATH": os.environ["PATH"]})
    assert found.words == "HF_TOKEN set, WANDB_API_KEY, RUNPOD_API_KEY not" and "abcdef" not in str(found)
    assert check_secrets({}).words.startswith("none set")

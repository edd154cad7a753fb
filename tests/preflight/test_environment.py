"""Driver, limits, disks and secrets of a machine."""

import os
import re
from pathlib import Path

import pytest

from gpt2_repro.preflight import environment
from gpt2_repro.preflight.environment import (
    check_driver,
    check_limits,
    check_python,
    check_room,
    check_secrets,
    check_speed,
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


def test_packages_against_their_pins(tmp_path: Path) -> None:
    root = Path(environment.__file__).parents[2]
    assert {finding.mark for finding in check_python(root / "requirements.txt")} == {"✓"}
    pins = tmp_path / "requirements.txt"
    pins.write_text("transformers==1.0\n")
    (changed,) = [finding for finding in check_python(pins) if finding.mark != "✓"]
    assert changed.about == "transformers" and changed.words.endswith("tested with 1.0")


def test_room_is_that_of_the_disk_or_of_the_rented_volume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_room("disk", tmp_path / "not" / "there", 1000).mark == "✓"
    assert check_room("disk", tmp_path, 10**18).mark == "✗"
    (tmp_path / "data.bin").write_bytes(b"x" * 3_000_000)
    monkeypatch.setattr(environment, "_mount", lambda path: tmp_path)
    environment._used_bytes.cache_clear()
    # The disk has room for it, the volume as it was rented has not.
    small = check_room("disk", tmp_path, 8_000_000, volume_bytes=10_000_000)
    assert small.mark == "✗" and "rent a larger one" in small.words
    assert check_room("disk", tmp_path, 6_000_000, volume_bytes=10_000_000).mark == "✓"
    (tmp_path / "gone").symlink_to(tmp_path / "nothing")
    assert environment._used_bytes(tmp_path) == pytest.approx(3_000_000, abs=1000)
    assert not environment._of(Path("/proc").stat().st_dev, tmp_path) and not environment._of(0, tmp_path / "nothing")


def test_speed_is_measured_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "PROBE_BYTES", 2**23)
    found = check_speed("speed", tmp_path / "not" / "there")
    writes, reads = (float(number.replace(",", "")) for number in re.findall(r"([\d,]+) ", found.words)[:2])
    assert writes > 0 and reads > 0 and list(tmp_path.iterdir()) == []
    monkeypatch.setattr(environment, "SLOW", 1e15)
    assert check_speed("speed", tmp_path).mark == "!"


def test_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(finding.mark in ("✓", "!", "✗") for finding in check_limits())
    monkeypatch.setattr(environment, "LEAST_SHARED_MEMORY", 1e18)
    shared, files = check_limits(tmp_path)
    assert shared.mark == "✗" and "--shm-size" in shared.words
    monkeypatch.setattr(environment.resource, "getrlimit", lambda which: (1024, 4096))
    assert check_limits(tmp_path)[1].mark == "!" and files.about == "open files"


def test_secrets_are_named_and_never_shown() -> None:
    found = check_secrets({"HF_TOKEN": "hf_abcdef", "RUNPOD_API_KEY": "", "PATH": os.environ["PATH"]})
    assert found.words == "HF_TOKEN set, WANDB_API_KEY, RUNPOD_API_KEY not" and "abcdef" not in str(found)
    assert check_secrets({}).words.startswith("none set")

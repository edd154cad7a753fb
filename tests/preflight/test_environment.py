"""Driver, limits, disks and secrets of a machine."""

import os
from pathlib import Path

import pytest

from gpt2_repro.preflight import environment
from gpt2_repro.preflight.environment import check_driver, check_limits, check_python, check_secrets


@pytest.mark.parametrize(
    ("driver", "cuda", "mark", "words"),
    [
        ("580.65.06", "13.0", "✓", ""),
        ("570.133.20", "13.0", "✗", "580"),
        ("535.104", "12.8", "✓", ""),
        ("470.1", "12.1", "✗", "525"),
        ("580.1", None, "✗", ""),
        (None, None, "!", ""),
        ("unknown", "13.0", "!", ""),
        ("999.1", "27.0", "!", ""),
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

"""`preflight --memory` runs train.py to find a micro-batch size that fits."""

from pathlib import Path

import pytest

from gpt2_repro.preflight import __main__ as preflight


pytestmark = pytest.mark.faults
ROOT = Path(__file__).parents[2]


def test_memory_trials_run_the_real_command(
    tiny_recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`preflight --memory` reduces the micro-batch size until train.py succeeds."""
    (tmp_path / "requirements.txt").symlink_to(ROOT / "requirements.txt")
    (tmp_path / "train.py").symlink_to(ROOT / "tests" / "faults" / "faulty_train.py")
    fault = {"FAULT": "small_device", "FAULT_AT": "0", "FAULT_RANK": "0", "FAULT_MARK": str(tmp_path / "mark")}
    for name, value in fault.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(preflight, "ROOT", tmp_path)
    with pytest.raises(SystemExit) as end:
        preflight.main([str(tiny_recipe), "--memory", "--per_device_train_batch_size", "2"])
    out, err = capsys.readouterr()
    assert not end.value.code and "✓ memory           fits: --per_device_train_batch_size 1\n" in out, err

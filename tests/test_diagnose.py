"""`python -m gpt2_repro.diagnose` of a run, and as a user types it. What it finds: tests/evaluation/diagnosis."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from gpt2_repro import diagnose
from gpt2_repro.errors import UserError


@pytest.mark.slow
def test_a_run_brings_its_own_data_and_baseline(
    train: Callable[..., Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one, other = train(tmp_path / "one"), train(tmp_path / "other", "--seed", "7")
    with pytest.raises(UserError, match="the baseline of .* is untrained: type --baseline"):
        diagnose.main([str(one)])
    caplog.set_level("WARNING")
    diagnose.main([str(one), "--baseline", str(other), "--tokens", "2000"])
    found = json.loads((one / "evaluation" / "diagnosis" / "diagnosis.json").read_text())
    assert [bucket["label"] for bucket in found["domains"]] == ["validation text"]
    assert found["causes"] == []
    assert "domains (it takes two of 30 documents or more)" in found["not_judged"]
    # Without a network and without files, what only the Hub has is left out, and said.
    assert sum("left out (--local_data DIR reads it from a file)" in line for line in caplog.messages) == 2


def test_typed_by_a_user(type_command: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path) -> None:
    done = type_command("python", "-m", "gpt2_repro.diagnose", tmp_path / "none")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "Traceback" not in done.stderr
    done = type_command("python", "-m", "gpt2_repro.diagnose", "--help")
    assert done.returncode == 0
    assert "--baseline" in done.stdout

"""The command `python -m gpt2_repro.diagnose` works on finished runs."""

import json
from pathlib import Path

import pytest

from gpt2_repro import diagnose
from gpt2_repro.errors import UserError


@pytest.mark.slow
def test_a_run_brings_its_own_data_and_baseline(train, tmp_path: Path, caplog) -> None:
    longer = ("--config_overrides", "n_positions=48")  # than the rows of 32 tokens
    one, other = train(tmp_path / "one", *longer), train(tmp_path / "other", "--seed", "7", *longer)
    with pytest.raises(UserError, match="untrained.*--baseline"):
        diagnose.main([str(one)])
    with pytest.raises(UserError, match="--max_length"):  # more than the model has positions
        diagnose.main([str(one), "--baseline", str(other), "--max_length", "1024"])
    caplog.set_level("WARNING")
    diagnose.main([str(one), "--baseline", str(other), "--tokens", "2000"])
    found = json.loads((one / "evaluation" / "diagnosis" / "diagnosis.json").read_text())
    assert found["window"] == 48 and any("untrained" in line for line in caplog.messages)
    assert [bucket["label"] for bucket in found["domains"]] == ["validation text"]
    assert found["causes"] == [] and any(its.startswith("domains") for its in found["not_judged"])
    # Without network and local files, the two texts of the Hub are skipped with a warning.
    assert sum("--local_data DIR" in line for line in caplog.messages) == 2

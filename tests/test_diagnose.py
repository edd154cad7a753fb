"""The command `python -m gpt2_repro.diagnose` works on finished runs."""

import json
from pathlib import Path

import pytest
import yaml

from gpt2_repro import diagnose


@pytest.mark.slow
def test_a_run_brings_its_own_data_and_baseline(train, tmp_path: Path, caplog) -> None:
    one, other = train(tmp_path / "one"), train(tmp_path / "other", "--seed", "7")
    words = [str(one), "--baseline", str(other), "--tokens", "2000"]
    caplog.set_level("WARNING")
    diagnose.main(words)
    path = one / "evaluation" / "diagnosis" / "diagnosis.json"
    diagnosis = json.loads(path.read_text(encoding="utf-8"))
    assert [bucket["label"] for bucket in diagnosis["domains"]] == ["validation text"]
    # Without network and local files, the two texts of the Hub are skipped with a warning.
    assert sum("as --local_data" in line for line in caplog.messages) == 2
    # Positions that a model was not trained on are scored: they are one of the causes to find.
    recipe = yaml.safe_load((one / "recipe.yaml").read_text(encoding="utf-8"))
    recipe["data"]["sequence_length"] = diagnosis["window"] - 8
    (one / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    diagnose.main(words)
    assert json.loads(path.read_text(encoding="utf-8"))["window"] == diagnosis["window"] == 32
    assert any("untrained" in line for line in caplog.messages)

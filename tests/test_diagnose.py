"""The command `python -m gpt2_repro.diagnose` works on finished runs."""

import json
from pathlib import Path

import pytest
import yaml

from gpt2_repro import diagnose
from gpt2_repro.errors import UserError


@pytest.mark.slow
def test_a_run_brings_its_own_data_and_baseline(train, tmp_path: Path, caplog) -> None:
    one, other = train(tmp_path / "one"), train(tmp_path / "other", "--seed", "7")
    with pytest.raises(UserError, match="--max_length"):  # more than the model has positions
        diagnose.main([str(one), "--baseline", str(other), "--max_length", "1024"])
    caplog.set_level("WARNING")
    diagnose.main([str(one), "--baseline", str(other), "--tokens", "2000"])
    found = json.loads((one / "evaluation" / "diagnosis" / "diagnosis.json").read_text(encoding="utf-8"))
    assert [bucket["label"] for bucket in found["domains"]] == ["validation text"]
    # Without network and local files, the two texts of the Hub are skipped with a warning.
    assert sum("--local_data DIR" in line for line in caplog.messages) == 2
    # Positions that a model was not trained on are scored: they are one of the causes to find.
    recipe = yaml.safe_load((one / "recipe.yaml").read_text(encoding="utf-8"))
    (one / "recipe.yaml").write_text(
        yaml.safe_dump(recipe | {"data": recipe["data"] | {"sequence_length": found["window"] - 8}}), encoding="utf-8"
    )
    diagnose.main([str(one), "--baseline", str(other), "--tokens", "2000", "--output_dir", str(tmp_path / "again")])
    assert (
        json.loads((tmp_path / "again" / "diagnosis.json").read_text(encoding="utf-8"))["window"]
        == found["window"]
        == 32
    )
    assert any("untrained" in line for line in caplog.messages)

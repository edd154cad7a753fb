"""Each rung of recipes/ladder trains with Muon under ZeRO-1, resumes, and is exported and scored."""

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from tests.sections import RECIPES, values_of


RUNGS = [path for path in RECIPES if path.parent.name == "ladder"]


@pytest.mark.slow
@pytest.mark.parametrize("path", RUNGS, ids=lambda path: path.stem)
def test_a_rung_trains_resumes_and_is_scored(
    path: Path, train, events, type_command, tiny_data: Path, tmp_path: Path
) -> None:
    model = values_of(path)["model"]
    overrides = model["config_overrides"].values
    overrides |= {"num_key_value_heads": 1} if "num_key_value_heads" in overrides else {}
    options = ("--model_type", model["model_type"], "--config_overrides", json.dumps(overrides), "--optim", "muon")
    options += ("--per_device_train_batch_size", 4)
    straight = train(tmp_path / "straight", *options, launcher=("launch", 2))
    train(tmp_path / "run", *options, "--stop_at_step", 4, launcher=("launch", 2))
    run = train(tmp_path / "run", *options, launcher=("launch", 2))
    finals = [(one / "final" / "model.safetensors").read_bytes() for one in (straight, run)]
    assert finals[0] == finals[1]
    losses = [event["eval_loss"] for event in events(run) if "eval_loss" in event]
    assert losses[-1] < losses[0]
    final = AutoModelForCausalLM.from_pretrained(run / "final")
    assert final.config.model_type == model["model_type"] and final.config.vocab_size == final.lm_head.out_features
    done = type_command("bash", "evaluate.sh", run, "--local_data", tiny_data, "--tasks", "document_perplexity")
    assert done.returncode == 0, done.stderr[-2000:]
    comparison = json.loads((run / "evaluation" / "comparison.json").read_text(encoding="utf-8"))
    (bits,) = (row for row in comparison["rows"] if row["metric"] == "bits_per_byte")
    scored = next(iter(bits["values"].values()))["value"]
    (logged,) = [event["eval_bits_per_byte"] for event in events(run) if "eval_bits_per_byte" in event][-1:]
    # Documents have their own contexts in the evaluation, and rows have other documents before them.
    assert scored == pytest.approx(logged, rel=0.1)

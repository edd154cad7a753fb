"""Training works with document masks and with architectures other than GPT-2."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from gpt2_repro.model.load import load_pair
from tests.faults.runs import losses, results, weights
from tests.sections import RECIPES, values_of
from tests.training.by_hand import nll, rows_of, targets_of


def naive_loss(run: Path, data: Path) -> float:
    """Return the final model's mean validation loss, one forward pass per document."""
    model = AutoModelForCausalLM.from_pretrained(run / "final").eval()
    separator = AutoTokenizer.from_pretrained(data / "tokenizer").eos_token_id
    rows, total = rows_of(data, "validation"), 0.0
    for ids in rows:
        begins = sorted({0, *(ids[:-1] == separator).nonzero().flatten().tolist()})
        for begin, end in zip(begins, [*begins[1:], len(ids) - 1], strict=True):
            total += nll(model, ids[begin : end + 1], begin=begin)
    return total / targets_of(rows)


def test_document_mask_in_training_and_validation(straight, train, typed, events, tiny_data: Path, tmp_path) -> None:
    masked = train(tmp_path / "masked", "--document_mask")
    assert "document_mask" not in (masked / "final" / "config.json").read_text(encoding="utf-8")
    # The loss with a document mask differs from the loss of the same run without a mask.
    last, across = events(masked)[-1], events(straight)[-1]
    assert last["step"] == 8 and last["eval_loss"] == pytest.approx(naive_loss(masked, tiny_data), abs=1e-5)
    assert abs(across["eval_loss"] - last["eval_loss"]) > 1e-4
    refused = typed(masked)
    assert refused.returncode == 2 and "document_mask True -> False" in refused.stderr


KINDS = {
    "llama": '{"num_key_value_heads": 1, "intermediate_size": 64, "tie_word_embeddings": true}',
    "mixtral": '{"num_local_experts": 4, "num_key_value_heads": 1, "intermediate_size": 32, "router_aux_loss_coef": 0.1}',
}


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> tuple[str, ...]:
    # Experts are balanced over a forward pass, so one process and two processes need the same passes.
    words = ("--model_type", request.param, "--config_overrides", KINDS[request.param])
    return *words, "--per_device_train_batch_size", "4"


@pytest.fixture(scope="module")
def whole(train, kind: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp(kind[1]) / "run", *kind)


# Trainer restores weights by name, and the weights of experts have other names on disk.
@pytest.mark.parametrize("kind", ["mixtral"], indirect=True)
def test_resumed_run_equals_uninterrupted_run(train, kind, whole: Path, tmp_path: Path) -> None:
    run = train(tmp_path / "run", *kind, "--stop_at_step", 4)
    train(run, *kind)
    assert results(run) == results(whole)


@pytest.mark.slow
def test_two_processes_match_one_process(train, events, kind, whole: Path, tmp_path: Path) -> None:
    run = train(tmp_path / "run", *kind, launcher=("launch", 2))
    found, expected = ({its[:2]: its[2] for its in losses(each)} for each in (run, whole))
    assert found == pytest.approx(expected, abs=1e-5)


def test_stock_transformers_loads_the_final_model(events, whole: Path, kind, typed, tiny_data: Path) -> None:
    model, tokenizer = load_pair(str(whole / "final"))
    stock = AutoModelForCausalLM.from_pretrained(whole / "final")
    config = json.loads((whole / "final/config.json").read_text(encoding="utf-8"))
    assert type(stock) is type(model) and config["model_type"] == kind[1]
    assert "true_vocab_size" not in config and config["vocab_size"] == len(tokenizer)
    rows = torch.stack(rows_of(tiny_data, "validation"))
    with torch.no_grad():
        nll = cross_entropy(stock(rows[:, :-1]).logits.flatten(0, 1), rows[:, 1:].flatten())
    validated = [event["eval_loss"] for event in events(whole) if "eval_loss" in event]
    assert nll.item() == pytest.approx(validated[-1], abs=1e-5)
    assert validated[0] == pytest.approx(math.log(len(tokenizer)), abs=0.1) and validated[-1] < validated[0] - 1
    done = typed(whole, "--max_steps", 9)
    assert done.returncode == 2 and f"model_type {kind[1]!r} -> 'gpt2'" in done.stderr


RUNGS = [path for path in RECIPES if path.parent.name == "ladder"]


@pytest.mark.slow
@pytest.mark.parametrize("path", RUNGS, ids=lambda path: path.stem)
def test_a_rung_trains_with_muon_and_resumes(path: Path, train, events, tmp_path: Path) -> None:
    """Each rung of recipes/ladder, under ZeRO-1."""
    model = values_of(path)["model"]
    overrides = model["config_overrides"]
    overrides |= {"num_key_value_heads": 1} if "num_key_value_heads" in overrides else {}
    options = ("--model_type", model["model_type"], "--config_overrides", json.dumps(overrides), "--optim", "muon")
    options += ("--per_device_train_batch_size", 4)
    straight = train(tmp_path / "straight", *options, launcher=("launch", 2))
    for stop in (4, 0):
        run = train(tmp_path / "run", *options, "--stop_at_step", stop, launcher=("launch", 2))
    assert weights(run) == weights(straight)
    losses = [event["eval_loss"] for event in events(run) if "eval_loss" in event]
    assert losses[-1] < losses[0]
    final = AutoModelForCausalLM.from_pretrained(run / "final")
    assert final.config.model_type == model["model_type"] and final.config.vocab_size == final.lm_head.out_features

"""Training with group_by_length gives the expected losses.

Additional validation sets give the expected losses too.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.training.by_hand import mean_nll, order_of, rows_of, targets_of, untrained


TOKENS = 2048  # targets per step. The longest row has 32 targets.
CUT = 1500  # limit of validation targets


@pytest.fixture(scope="module")
def steps(wrapped_data: Path) -> list[list[torch.Tensor]]:
    """Return the rows that each step of two epochs must contain."""
    rows, found = rows_of(wrapped_data, "train"), []
    for epoch in (0, 1):
        of_epoch: list[list[torch.Tensor]] = [[] for _ in range(-(-targets_of(rows) // TOKENS))]
        before = 0
        for place in order_of(rows, 1, epoch):
            of_epoch[before // TOKENS].append(rows[place])
            before += len(rows[place]) - 1
        found += of_epoch[: targets_of(rows) // TOKENS]
    return found


@pytest.fixture(scope="module")
def grouped(wrapped_data: Path, train, steps, tmp_path_factory) -> Callable[..., Path]:
    """Return a function that trains until two steps before the end of epoch 2."""
    folder = tmp_path_factory.mktemp("runs")
    options = ("--dataset_dir", wrapped_data, "--packing", "wrap", "--min_length", 8, "--sample_tokens", 0)
    options += ("--train_sampling_strategy", "group_by_length")
    options += ("--tokens_per_step", TOKENS, "--max_steps", len(steps) - 2, "--eval_tokens", CUT, "--eval_steps", 4)
    return lambda name, *more, rows=32, **launcher: train(
        folder / name, *options, "--per_device_train_batch_size", rows, *more, **launcher
    )


@pytest.fixture(scope="module")
def whole(grouped) -> Path:
    return grouped("straight")


def test_steps_match_the_reference(whole: Path, steps, events) -> None:
    logged = [event for event in events(whole) if "loss" in event]
    assert [event["step"] for event in logged] == list(range(1, len(steps) - 1)) and len(steps) >= 8
    seen = 0
    for event, step in zip(logged, steps[:-2], strict=True):
        seen += targets_of(step)
        assert (event["step_tokens"], event["tokens"]) == (targets_of(step), seen)
        assert abs(targets_of(step) - TOKENS) < 32 and 0 <= event["padding"] < 0.1
    assert logged[0]["loss"] == pytest.approx(mean_nll(untrained(whole), steps[0]), abs=1e-5)
    plan = json.loads((whole / "environment.json").read_text(encoding="utf-8"))["plan"]
    assert plan["by_length"] and plan["gradient_accumulation_steps"] == 4  # 1 + ln 4 + 2,079 / (1,024 * 32 / 33)


@pytest.mark.slow
def test_two_zero1_processes_match_one_process(whole: Path, grouped, events) -> None:
    run = grouped("two", rows=16, launcher=("launch", 2))
    engine = json.loads((run / "environment.json").read_text(encoding="utf-8"))["engine"]
    assert (engine["zero_stage"], engine["processes"], engine["accumulation_steps"]) == (1, 2, 3)
    keys = ("loss", "step_tokens", "tokens", "eval_loss", "eval_few_loss", "eval_many_words_loss", "eval_few_tokens")
    for ours, theirs in zip(events(run), events(whole), strict=True):
        for key in keys:
            assert ours.get(key) == pytest.approx(theirs.get(key), abs=1e-5), (ours["step"], key)


def test_run_resumed_within_an_epoch_equals_uninterrupted_run(whole: Path, grouped, steps, events) -> None:
    grouped("resumed", "--stop_at_step", len(steps) // 2 + 2)
    run = grouped("resumed")
    losses = [[event["loss"] for event in events(folder) if "loss" in event] for folder in (run, whole)]
    finals = [load_file(folder / "final" / "model.safetensors") for folder in (run, whole)]
    assert losses[0] == losses[1] and all(torch.equal(weight, finals[1][name]) for name, weight in finals[0].items())


def test_each_validation_set_has_its_own_loss(whole: Path, wrapped_data: Path, events) -> None:
    validated = [event for event in events(whole) if "eval_loss" in event]
    final = AutoModelForCausalLM.from_pretrained(whole / "final").eval()
    status = json.loads((whole / "run_status.json").read_text(encoding="utf-8"))
    card = (whole / "final" / "README.md").read_text(encoding="utf-8")
    for key, name in {"eval": "", "eval_few": "_few", "eval_many_words": "_many_words"}.items():
        rows = rows_of(wrapped_data, f"validation{name}")
        taken = [row for place, row in enumerate(rows) if targets_of(rows[:place]) < CUT]
        assert (len(taken) < len(rows)) == (name != "_few")
        assert {event[f"{key}_tokens"] for event in validated} == {targets_of(taken)}
        for event, model in ((validated[0], untrained(whole)), (validated[-1], final)):
            assert event[f"{key}_loss"] == pytest.approx(mean_nll(model, taken), abs=1e-5), (key, event["step"])
        assert status[f"{key}_loss"] == validated[-1][f"{key}_loss"] and f"{status[f'{key}_loss']:.4f} nats" in card

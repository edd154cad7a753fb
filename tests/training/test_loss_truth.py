"""The logged loss is the mean negative log-likelihood per target.

Steps with group_by_length and additional validation sets have the expected losses too.
"""

import itertools
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from tests.faults.runs import losses, weights
from tests.training.by_hand import mean_nll, nll, order_of, rows_of, targets_of, untrained


TOKENS = 2048  # targets per step. The longest row has 32 targets.


@pytest.mark.parametrize("launcher", [("python",), ("launch", 2)], ids=["one-process", "two-zero1"])
def test_each_step_of_two_epochs_matches_the_reference(launcher, train, wrapped_data: Path, events, tmp_path) -> None:
    """Each step has the expected rows, loss, padding and learning rate."""
    rows, validation = (rows_of(wrapped_data, split) for split in ("train", "validation"))
    assert len({len(row) for row in rows}) > 3 and len(validation) % 4  # 4 is the number of rows in a validation batch
    one, steps, run = launcher == ("python",), len(rows) // 64, tmp_path / "run"
    micro, last = (16 if one else 8), 2 * steps + 2
    # The learning rate is too small to change the weights, so the losses are those of the initial model.
    options = ("--dataset_dir", wrapped_data, "--packing", "wrap", "--min_length", 8, "--tokens_per_step", 64 * 32)
    options += ("--per_device_train_batch_size", micro, "--learning_rate", 1e-30, "--max_steps", last)
    options += ("--eval_steps", steps + 2, "--save_steps", 1000, "--final_learning_rate_fraction", 0.1)
    for stop in (steps + 2, 0) if one else (0,):  # the run on one process is interrupted in its second epoch
        train(run, *options, "--stop_at_step", stop, launcher=launcher)
    # DeepSpeed's copy of the weights does not show which are tied. Saved twice, they do not fit into the memory for it.
    assert "lm_head.weight" not in load_file(run / f"checkpoint-{last}" / "model.safetensors")

    fresh = untrained(run)
    validated = {event["step"]: event for event in events(run) if "eval_loss" in event}
    assert list(validated) == [0, steps + 2, last]
    assert {event["eval_tokens"] for event in validated.values()} == {targets_of(validation)}
    assert validated[0]["eval_loss"] == pytest.approx(mean_nll(fresh, validation), abs=1e-5)

    of_row, seen = [nll(fresh, row) for row in rows], 0
    logged = [event for event in events(run) if "loss" in event]
    assert [event["step"] for event in logged] == list(range(1, last + 1))
    for event in logged:
        epoch, place = divmod(event["step"] - 1, steps)
        order = order_of(rows, 64, epoch)[place * 64 : (place + 1) * 64]
        targets = targets_of([rows[row] for row in order])
        seen += targets
        assert event["loss"] == pytest.approx(sum(of_row[row] for row in order) / targets, abs=1e-5), event["step"]
        # Targets are counted, not positions, also after a resume.
        assert (event["tokens"], event["step_tokens"]) == (seen, targets)
        longest = [max(len(rows[row]) - 1 for row in order[first : first + micro]) for first in range(0, 64, micro)]
        assert event["padding"] == pytest.approx(1 - targets / (micro * sum(longest)), abs=1e-4)
    assert seen < last * 64 * 32
    fall = [0.1 + 0.45 * (1 + math.cos(math.pi * step / (last - 3))) for step in range(last - 3)]
    rates = [event["learning_rate"] * 1e30 for event in logged]
    assert rates == pytest.approx([1 / 3, 2 / 3, 1, *fall], rel=1e-9)

    first = [rows[row] for row in order_of(rows, 64, epoch=0)[:64]]
    for row in first:
        logits = fresh(row[None, :-1]).logits[0, :, :300]
        (F.cross_entropy(logits, row[1:], reduction="sum") / targets_of(first)).backward()
    norm = torch.stack([parameter.grad.norm() for parameter in fresh.parameters()]).norm().item()
    assert logged[0]["grad_norm"] == pytest.approx(norm, rel=1e-4)


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile on a CPU needs a C++ compiler")
def test_compiled_run_matches_eager_run(train, events, type_command, tiny_recipe: Path, tmp_path: Path) -> None:
    # 151 validation rows in batches of 4: the last batch is short and is not compiled again.
    options = ("--eval_tokens", 151 * 32, "--activation_checkpointing", "--max_steps", 4)
    eager, run = train(tmp_path / "eager", *options), tmp_path / "compiled"
    options += ("--output_dir", run, "--torch_compile", "--per_device_train_batch_size", 4)
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    done = type_command("launch", 1, "train.py", tiny_recipe, *options, timeout=500, **cache)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("compiling the ") == 2  # one for training, one for validation
    for ours, theirs in zip(events(run), events(eager), strict=True):
        for key in ("loss", "eval_loss"):
            assert ours.get(key) == pytest.approx(theirs.get(key), abs=1e-5), ours["step"]


@pytest.fixture(scope="module")
def steps(wrapped_data: Path) -> list[list[torch.Tensor]]:
    """Return the rows that each step of two epochs must contain."""
    rows, found = rows_of(wrapped_data, "train"), []
    for epoch in (0, 1):
        ordered = [rows[place] for place in order_of(rows, 1, epoch)]
        before = itertools.accumulate((len(row) - 1 for row in ordered), initial=0)
        of_step = itertools.groupby(zip(ordered, before, strict=False), lambda pair: pair[1] // TOKENS)
        found += [[row for row, _ in pairs] for _, pairs in of_step][: targets_of(rows) // TOKENS]
    return found


@pytest.fixture(scope="module")
def grouped(wrapped_data: Path, train, steps, tmp_path_factory) -> Callable[..., Path]:
    """Return a function that trains until two steps before the end of epoch 2."""
    folder = tmp_path_factory.mktemp("runs")
    options = ("--dataset_dir", wrapped_data, "--packing", "wrap", "--min_length", 8, "--sample_tokens", 0)
    options += ("--train_sampling_strategy", "group_by_length")
    options += ("--tokens_per_step", TOKENS, "--max_steps", len(steps) - 2, "--eval_steps", 4)
    options += ("--per_device_train_batch_size", 32)
    return lambda name, *more, **launcher: train(folder / name, *options, *more, **launcher)


@pytest.fixture(scope="module")
def whole(grouped) -> Path:
    return grouped("straight")


def test_steps_of_rows_by_length_match_the_reference(whole: Path, steps, events) -> None:
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
def test_two_processes_with_rows_by_length_match_one_process(whole: Path, grouped, events) -> None:
    run = grouped("two", "--per_device_train_batch_size", 16, launcher=("launch", 2))
    engine = json.loads((run / "environment.json").read_text(encoding="utf-8"))["engine"]
    assert (engine["zero_stage"], engine["processes"], engine["accumulation_steps"]) == (1, 2, 3)
    keys = ("loss", "step_tokens", "tokens", "eval_loss", "eval_few_loss", "eval_few_tokens")
    for ours, theirs in zip(events(run), events(whole), strict=True):
        for key in keys:
            assert ours.get(key) == pytest.approx(theirs.get(key), abs=1e-5), (ours["step"], key)


def test_rows_by_length_resume_within_an_epoch(whole: Path, grouped, steps) -> None:
    grouped("resumed", "--stop_at_step", len(steps) // 2 + 2)
    run = grouped("resumed")
    own, expected = ([loss for loss in losses(folder) if loss[1] == "loss"] for folder in (run, whole))
    assert own == expected and weights(run) == weights(whole)

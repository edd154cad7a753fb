"""The logged loss is the mean negative log-likelihood per target, also of additional validation sets."""

import math
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from tests.training.by_hand import mean_nll, nll, order_of, rows_of, targets_of, untrained


@pytest.mark.parametrize("launcher", [("python",), ("launch", 2)], ids=["one-process", "two-zero1"])
def test_each_step_of_two_epochs_matches_the_reference(launcher, train, wrapped_data: Path, events, tmp_path) -> None:
    """Each step has the expected rows, loss, padding and learning rate."""
    rows, validation, few = (rows_of(wrapped_data, split) for split in ("train", "validation", "validation_few"))
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
    assert validated[0]["eval_few_loss"] == pytest.approx(mean_nll(fresh, few), abs=1e-5)
    assert validated[0]["eval_few_tokens"] == targets_of(few)

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

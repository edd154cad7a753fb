"""The recipe finetune_shakespeare.yaml fine-tunes a small checkpoint."""

import json
from pathlib import Path

import pytest

from gpt2_repro.hardware import Accelerator
from gpt2_repro.training import sizing
from gpt2_repro.training.sizing import follow_data
from tests.sections import parse_for_training


def test_finetuning_keeps_the_shape_and_a_constant_learning_rate(
    straight: Path, type_warm, tiny_data: Path, events, tmp_path: Path
) -> None:
    run = tmp_path / "tuned"
    form = ("--dataset_dir", tiny_data, "--sequence_length", 32, "--separator", "before", "--tokens_per_step", 256)
    form += ("--use_cpu", "--bf16", "false", "--dataloader_num_workers", 0, "--per_device_train_batch_size", 8)
    words = ("recipes/finetune_shakespeare.yaml", "--init_from", straight, "--output_dir", run, *form)
    done = type_warm("python", "train.py", *words, "--max_steps", 20, "--sample_prompt", "")
    assert done.returncode == 0, done.stderr
    run_identity = json.loads((run / "environment.json").read_text(encoding="utf-8"))["run_identity"]
    assert (run_identity["n_layer"], run_identity["n_head"], run_identity["n_embd"]) == (2, 2, 32)  # the checkpoint's
    logged = events(run)
    assert {event["learning_rate"] for event in logged if "loss" in event} == {3e-5}
    losses = {event["step"]: event["eval_loss"] for event in logged if "eval_loss" in event}
    before = [event["eval_loss"] for event in events(straight) if "eval_loss" in event]
    assert losses[0] == pytest.approx(before[-1], abs=1e-5) and list(losses) == [0, 5, 10, 15, 20]
    best = min((step for step in losses if step), key=lambda step: losses[step])
    kept = {path.name for path in run.glob("checkpoint-*")}
    assert kept == {"checkpoint-20", f"checkpoint-{best}"} and losses[best] < losses[0]


XL = ("--n_layer", 48, "--n_head", 25, "--n_embd", 1600)


@pytest.mark.parametrize(
    ("memory", "processes", "shape", "rows"),
    [(80e9, 1, (), 32), (80e9, 4, (), 8), (24e9, 1, XL, 1)],
)
def test_the_micro_batch_has_the_rows_that_fit(
    memory: float, processes: int, shape: tuple, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = Accelerator("cuda", "NVIDIA H100 80GB HBM3", 1, 989.4e12, int(memory))
    monkeypatch.setattr(sizing, "find_accelerator", lambda **_: gpu)
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    words = ("recipes/finetune_shakespeare.yaml", "--dataset_dir", "data/nowhere", *shape)
    recipe = follow_data(parse_for_training(*words))  # without prepared data
    assert recipe.training.per_device_train_batch_size == rows

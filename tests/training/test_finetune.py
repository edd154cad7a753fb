"""recipes/finetune_shakespeare.yaml from a small local checkpoint."""

import json
from pathlib import Path

import pytest

from gpt2_repro.report.page import label_runs
from gpt2_repro.report.read import read_run
from gpt2_repro.report.tables import recipe_differences, run_table


@pytest.fixture(scope="module")
def source(train, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose model is trained on."""
    return train(tmp_path_factory.mktemp("source") / "run")


def test_a_checkpoint_is_trained_on_in_its_own_shape_at_a_constant_rate(
    source: Path, type_warm, events, tiny_recipe: Path, tmp_path: Path
) -> None:
    data = tiny_recipe.with_name("data")
    rows = ("--sequence_length", 32, "--separator", "before", "--tokens_per_step", 256)
    words = ("recipes/finetune_shakespeare.yaml", "--init_from", source, "--dataset_dir", data, *rows)
    run = tmp_path / "tuned"
    options = ("--max_steps", 20, "--use_cpu", "--bf16", "false", "--output_dir", run, "--dataloader_num_workers", 0)
    done = type_warm("python", "train.py", *words, *options, "--sample_prompt", "", "--per_device_train_batch_size", 8)
    assert done.returncode == 0, done.stderr
    trajectory = json.loads((run / "environment.json").read_text())["trajectory"]
    assert (trajectory["n_layer"], trajectory["n_head"], trajectory["n_embd"]) == (2, 2, 32)  # the checkpoint's
    assert trajectory["lr_scheduler_type"] == "constant"
    logged = events(run)
    assert {event["learning_rate"] for event in logged if "loss" in event} == {3e-5}
    losses = {event["step"]: event["eval_loss"] for event in logged if "eval_loss" in event}
    before = next(event["eval_loss"] for event in reversed(events(source)) if "eval_loss" in event)
    assert losses[0] == pytest.approx(before, abs=1e-5) and list(losses) == [0, 5, 10, 15, 20]
    best = min((step for step in losses if step), key=lambda step: losses[step])
    kept = {path.name for path in run.glob("checkpoint-*")}
    assert kept == {"checkpoint-20", f"checkpoint-{best}"} and losses[best] < losses[0]


def test_two_sizes_stand_beside_each_other_in_one_report(
    source: Path, train, type_warm, tiny_recipe: Path, tmp_path: Path
) -> None:
    small = train(tmp_path / "small", "--n_layer", 1)
    rows = ("--dataset_dir", tiny_recipe.with_name("data"), "--sequence_length", 32, "--separator", "before")
    short = ("--tokens_per_step", 256, "--max_steps", 5, "--per_device_train_batch_size", 8, "--sample_tokens", 0)
    tuned = [tmp_path / f"tuned_{start.name}" for start in (source, small)]
    for start, run in zip((source, small), tuned, strict=True):
        words = ("recipes/finetune_shakespeare.yaml", "--init_from", start, "--output_dir", run, *rows, *short)
        done = type_warm("python", "train.py", *words, "--use_cpu", "--bf16", "false", "--dataloader_num_workers", 0)
        assert done.returncode == 0, done.stderr
    runs = [read_run(run) for run in tuned]
    table = run_table(runs, label_runs(runs))
    best = table.headers.index("its best")
    for run, row in zip(runs, table.rows, strict=True):
        assert row[best].text == f"{min(event['eval_loss'] for event in run.validation):.3f}"
        assert row[table.headers.index("parameters")].text == f"{run.environment['parameters']:,}"
    differences = {row[0].text for row in recipe_differences(runs, ["a", "b"]).rows}
    assert differences == {"model.n_layer", "model.init_from", "training.output_dir"}


def test_a_shape_that_is_typed_is_not_the_checkpoint_s(
    source: Path, type_warm, tiny_recipe: Path, tmp_path: Path
) -> None:
    words = (
        "recipes/finetune_shakespeare.yaml",
        "--init_from",
        source,
        "--dataset_dir",
        tiny_recipe.with_name("data"),
    )
    form = ("--sequence_length", 32, "--separator", "before", "--tokens_per_step", 256, "--n_layer", 3, "--use_cpu")
    done = type_warm("python", "train.py", *words, *form, "--output_dir", tmp_path / "run", "--bf16", "false")
    assert done.returncode == 2 and "has another shape than this recipe: type --n_layer 2" in done.stderr

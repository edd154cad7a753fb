"""recipes/finetune_shakespeare.yaml from a small local checkpoint."""

import json
from pathlib import Path

import pytest

from gpt2_repro.report.page import label_runs
from gpt2_repro.report.read import read_run
from gpt2_repro.report.tables import recipe_differences, run_table


@pytest.fixture(scope="module")
def tune(type_warm, data: Path):
    form = ("--dataset_dir", data, "--sequence_length", 32, "--separator", "before", "--tokens_per_step", 256)
    form += ("--use_cpu", "--bf16", "false", "--dataloader_num_workers", 0, "--per_device_train_batch_size", 8)

    def run(start: Path, output: Path, *options: object):
        words = ("recipes/finetune_shakespeare.yaml", "--init_from", start, "--output_dir", output, *form, *options)
        return type_warm("python", "train.py", *words)

    return run


def test_a_checkpoint_is_trained_on_in_its_own_shape_at_a_constant_rate(
    straight: Path, tune, train, events, tmp_path: Path
) -> None:
    small = train(tmp_path / "small", "--n_layer", 1)
    runs = [tmp_path / "tuned", tmp_path / "tuned_small"]
    for start, run, steps in ((straight, runs[0], 20), (small, runs[1], 5)):
        done = tune(start, run, "--max_steps", steps, "--sample_prompt", "")
        assert done.returncode == 0, done.stderr
    trajectory = json.loads((runs[0] / "environment.json").read_text())["trajectory"]
    assert (trajectory["n_layer"], trajectory["n_head"], trajectory["n_embd"]) == (2, 2, 32)  # the checkpoint's
    logged = events(runs[0])
    assert {event["learning_rate"] for event in logged if "loss" in event} == {3e-5}
    losses = {event["step"]: event["eval_loss"] for event in logged if "eval_loss" in event}
    before = [event["eval_loss"] for event in events(straight) if "eval_loss" in event]
    assert losses[0] == pytest.approx(before[-1], abs=1e-5) and list(losses) == [0, 5, 10, 15, 20]
    best = min((step for step in losses if step), key=lambda step: losses[step])
    kept = {path.name for path in runs[0].glob("checkpoint-*")}
    assert kept == {"checkpoint-20", f"checkpoint-{best}"} and losses[best] < losses[0]

    # Two sizes stand beside each other in one report.
    read = [read_run(run) for run in runs]
    table = run_table(read, label_runs(read))
    for run, row in zip(read, table.rows, strict=True):
        told = dict(zip(table.headers, row, strict=True))
        assert told["its best"].text == f"{min(event['eval_loss'] for event in run.validation):.3f}"
        assert told["parameters"].text == f"{run.environment['parameters']:,}"
    differences = {row[0].text for row in recipe_differences(read, ["a", "b"]).rows}
    assert differences >= {"model.n_layer", "model.init_from", "training.output_dir"}


def test_a_shape_that_is_typed_is_not_the_checkpoint_s(straight: Path, tune, tmp_path: Path) -> None:
    done = tune(straight, tmp_path / "run", "--n_layer", 3)
    assert done.returncode == 2 and "--n_layer 2" in done.stderr

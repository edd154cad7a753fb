"""What must not change a run does not: layout, launcher, interruption, a second start."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file


pytestmark = pytest.mark.slow


LAYOUTS = {
    "8x1": (("python",), 8),
    "4x2": (("python",), 4),
    "ddp-2x4": (("torchrun", 2), 4),
    "zero1-1x8": (("launch", 1), 8),
    "zero1-2x4": (("launch", 2), 4),
    "zero1-2x2x2": (("launch", 2), 2),
    "zero2-2x2x2": (("zero2", 2), 2),
    "zero3-2x2x2": (("zero3", 2), 2),
    "fsdp2-2x2x2": (("fsdp2", 2), 2),
}


@pytest.fixture(scope="module")
def layouts(train, tmp_path_factory) -> dict[str, Path]:
    """The same run in fp32, its 8 rows a step laid out in different ways."""
    folder = tmp_path_factory.mktemp("layouts")
    return {
        name: train(folder / name, "--per_device_train_batch_size", micro, launcher=launcher)
        for name, (launcher, micro) in LAYOUTS.items()
    }


def test_the_layout_does_not_change_the_losses(layouts: dict[str, Path], events) -> None:
    reference = [event for event in events(layouts["8x1"]) if "loss" in event or "eval_loss" in event]
    assert len(reference) == 8 + 3
    for name, run in layouts.items():
        for ours, theirs in zip(events(run), reference, strict=True):
            for key in ("loss", "eval_loss", "learning_rate"):
                assert ours.get(key) == pytest.approx(theirs.get(key), abs=1e-5), (name, ours["step"], key)
            assert ours.keys() - {"mfu"} == theirs.keys() - {"mfu"}
            if "grad_norm" in theirs:
                assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4), (name, ours["step"])
            assert ours["tokens"] == theirs["tokens"]


def test_each_layout_is_what_it_says(layouts: dict[str, Path]) -> None:
    for name, run in layouts.items():
        environment = json.loads((run / "environment.json").read_text())
        launcher, micro = LAYOUTS[name]
        plan = environment["plan"]
        processes = launcher[1] if len(launcher) == 2 else 1
        assert plan["num_processes"] == processes
        assert plan["num_processes"] * plan["gradient_accumulation_steps"] * micro == 8
        engine = environment["engine"]
        assert engine["zero_stage"] == {"zero1": 1, "zero2": 2, "zero3": 3}.get(name.split("-")[0])
        assert engine["engine"] == {
            "zero1": "DeepSpeedEngine",
            "zero2": "DeepSpeedEngine",
            "zero3": "DeepSpeedEngine",
            "ddp": "DistributedDataParallel",
            "fsdp2": "FSDPGPT2LMHeadModel",
        }.get(name.split("-")[0], "GPT2LMHeadModel")
        assert engine["weights"] == engine["products"] == engine["masters"] == engine["accumulation"] == "float32"
        assert (engine["processes"], engine["clip"], engine["compiled"]) == (processes, 1.0, False)
        assert engine["optimizer"] == "AdamW"
        distributed = launcher[0] != "python"
        assert engine["backend"] == ("gloo" if distributed else None)
        assert engine["communication"] == ("float32" if distributed else None)
        if "zero" in name:
            assert engine["rows_per_pass"] == micro
            assert engine["accumulation_steps"] == plan["gradient_accumulation_steps"]


def test_the_final_weights_agree(layouts: dict[str, Path]) -> None:
    reference = load_file(layouts["8x1"] / "final" / "model.safetensors")
    for name, run in layouts.items():
        weights = load_file(run / "final" / "model.safetensors")
        assert weights.keys() == reference.keys()
        for key, weight in weights.items():
            assert torch.allclose(weight, reference[key], atol=1e-4), (name, key)


def test_two_runs_are_bit_identical(layouts: dict[str, Path], train, events, tmp_path: Path) -> None:
    again = train(tmp_path / "again")
    losses = [[event.get("loss", event.get("eval_loss")) for event in events(run)] for run in (again, layouts["8x1"])]
    assert losses[0] == losses[1]
    assert (again / "final" / "model.safetensors").read_bytes() == (
        layouts["8x1"] / "final" / "model.safetensors"
    ).read_bytes()


@pytest.mark.parametrize(
    ("launcher", "precision"),
    [(("python",), "false"), (("launch", 2), "true")],
    ids=["one-fp32", "zero1-bf16"],
)
def test_a_resumed_run_is_the_straight_one(launcher, precision, train, events, tmp_path: Path) -> None:
    options = ("--bf16", precision, "--per_device_train_batch_size", 4, "--dropout", 0.1)
    straight = train(tmp_path / "straight", *options, launcher=launcher)
    stopped = train(tmp_path / "stopped", *options, "--stop_at_step", 3, launcher=launcher)
    status = json.loads((stopped / "run_status.json").read_text())
    assert (status["state"], status["step"], status["tokens"]) == ("stopped", 3, 3 * 256)
    assert not (stopped / "final").exists() and (stopped / "checkpoint-3" / "manifest.json").exists()
    resumed = train(stopped, *options, launcher=launcher)
    losses = [
        {event["step"]: event["loss"] for event in events(run) if "loss" in event} for run in (straight, resumed)
    ]
    assert losses[0] == losses[1] and len(losses[0]) == 8
    finals = [load_file(run / "final" / "model.safetensors") for run in (straight, resumed)]
    assert all(torch.equal(weight, finals[1][name]) for name, weight in finals[0].items())
    assert json.loads((resumed / "run_status.json").read_text())["state"] == "complete"


@pytest.mark.parametrize("name", ["zero3-2x2x2", "fsdp2-2x2x2"])
def test_sharded_weights_are_resumed_and_written_whole(
    name: str, layouts: dict[str, Path], train, type_warm, tiny_recipe: Path, events, tmp_path: Path
) -> None:
    launcher, micro = LAYOUTS[name]
    options, run = ("--per_device_train_batch_size", micro), tmp_path / "run"
    train(run, *options, "--stop_at_step", 3, launcher=launcher)
    saved, config = load_file(run / "checkpoint-3" / "model.safetensors"), (run / "checkpoint-3" / "config.json")
    assert saved["transformer.wte.weight"].shape == (json.loads(config.read_text())["vocab_size"], 32)
    train(run, *options, launcher=launcher)
    losses = [
        {event["step"]: event["loss"] for event in events(path) if "loss" in event} for path in (run, layouts[name])
    ]
    assert losses[0] == losses[1] and len(losses[0]) == 8
    finals = [(path / "final" / "model.safetensors").read_bytes() for path in (run, layouts[name])]
    assert finals[0] == finals[1]
    texts = [json.loads((path / "samples.jsonl").read_text().split("\n")[0]) for path in (run, layouts["8x1"])]
    assert texts[0] == texts[1]


def test_a_damaged_checkpoint_is_passed_over_and_another_run_refused(
    train, type_warm, tiny_recipe: Path, events, tmp_path: Path
) -> None:
    run = train(tmp_path / "run", "--save_steps", 2, "--stop_at_step", 5, "--keep_checkpoints", 0)
    assert sorted(path.name for path in run.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-4", "checkpoint-5"]
    (run / "checkpoint-5" / "optimizer.pt").write_bytes(b"cut short")
    words = ("python", "train.py", tiny_recipe, "--output_dir", run, "--save_steps", 2)

    other = type_warm(*words, "--seed", 7)
    assert other.returncode == 2
    assert "belongs to another run (seed 42 -> 7)" in other.stderr and "--output_dir" in other.stderr
    assert yaml.safe_load((run / "recipe.yaml").read_text())["training"].get("seed", 42) == 42

    resumed = type_warm(*words, "--logging_steps", 2)  # intervals may change
    assert resumed.returncode == 0, resumed.stderr
    assert f"skipping {run}/checkpoint-5: optimizer.pt is missing or cut short" in resumed.stdout
    assert f"resuming from {run}/checkpoint-4" in resumed.stdout
    # Step 5 was after the checkpoint: it is written once, by the run that went on.
    assert [event["step"] for event in events(run) if "loss" in event] == [1, 2, 3, 4, 6, 8]


def test_a_checkpoint_of_deepspeed_is_not_resumed_without_it(
    layouts: dict[str, Path], type_warm, tiny_recipe: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(layouts["zero1-2x4"], run)
    for kept in ("environment.json", "run_status.json"):  # as if the checkpoints alone were carried over
        (run / kept).unlink()
    done = type_warm("python", "train.py", tiny_recipe, "--output_dir", run)
    assert done.returncode == 2 and "was written with DeepSpeed: launch with zero1.yaml" in done.stderr


def test_a_finished_run_is_left_as_it_is(layouts: dict[str, Path], type_warm, tiny_recipe: Path) -> None:
    run = layouts["8x1"]
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()}
    done = type_warm("python", "train.py", tiny_recipe, "--output_dir", run)
    assert done.returncode == 0 and f"{run} is already complete: {run}/final" in done.stdout
    other = type_warm("python", "train.py", tiny_recipe, "--output_dir", run, "--learning_rate", 0.5)
    assert other.returncode == 2 and "belongs to another run (learning_rate 0.01 -> 0.5)" in other.stderr
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()} == before


def test_a_run_killed_before_its_final_folder_only_writes_that(
    layouts: dict[str, Path], train, events, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(layouts["zero1-2x4"], run)
    shutil.rmtree(run / "final")
    status = json.loads((run / "run_status.json").read_text())
    (run / "run_status.json").write_text(json.dumps(status | {"state": "running"}))
    lines = len(events(run))
    train(run, "--per_device_train_batch_size", 4, launcher=("launch", 2))
    assert len(events(run)) == lines
    finals = [load_file(path / "final" / "model.safetensors") for path in (run, layouts["zero1-2x4"])]
    assert all(torch.equal(weight, finals[1][name]) for name, weight in finals[0].items())


def test_a_run_goes_on_without_the_weights_it_started_from(
    layouts: dict[str, Path], train, type_warm, tiny_recipe: Path, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    shutil.copytree(layouts["8x1"] / "final", source)
    run = train(tmp_path / "run", "--init_from", source, "--stop_at_step", 4)
    shutil.rmtree(source)
    train(run, "--init_from", source)
    assert f"trained on from the weights of `{source}`" in (run / "final" / "README.md").read_text()
    gone = type_warm("python", "train.py", tiny_recipe, "--output_dir", tmp_path / "new", "--init_from", source)
    assert gone.returncode == 2 and f"there is no checkpoint {source}" in gone.stderr
    assert not (tmp_path / "new").exists()

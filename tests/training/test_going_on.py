"""Runs can stop early, go back, become longer, change settings, and be fine-tuned."""

import json
import shutil
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import yaml

from gpt2_repro.checkpoints.manifest import manifest_hash
from gpt2_repro.data.arguments import DataArguments, PreparationOptions
from gpt2_repro.data.preparation.prepare import prepare
from gpt2_repro.model.checkpoint import resolve_checkpoint
from gpt2_repro.optim.schedule import learning_rate_factor
from tests.faults.runs import status, weights
from tests.reference import write_jsonl


def rates(events, run: Path) -> dict[int, float]:
    return {event["step"]: event["learning_rate"] for event in events(run) if "loss" in event}


def test_finished_run_can_become_longer_and_go_back(finished: Path, straight: Path, train, events, typed) -> None:
    final, options = finished / "final", ("--keep_checkpoints", 0, "--total_tokens", 16 * 256, "--learning_rate", 2e-2)
    assert typed(finished, *options).returncode == 2
    options += ("--allow_resume_change",)
    card = (final / "README.md").read_text(encoding="utf-8")
    for _ in range(2):  # at the second start, the run has reached this step already
        train(finished, *options, "--stop_at_step", 12)
        assert (status(finished)["reason"], status(finished)["step"]) == ("--stop_at_step 12", 12)
    # The final model keeps its own record until the continued run replaces it.
    assert (final / "README.md").read_text(encoding="utf-8") == card
    tokens = [resolve_checkpoint(str(path)).tokens_trained for path in (final, finished / "checkpoint-12")]
    assert tokens == [8 * 256, 12 * 256]
    train(finished, *options)
    told = status(finished)
    assert (told["state"], told["step"], told["max_steps"], told["tokens"]) == ("complete", 16, 16, 16 * 256)
    # From the first new step on, the schedule is that of a run with 16 steps and the new rate.
    settings = [(1e-2, 8)] * 8 + [(2e-2, 16)] * 8
    expected = [
        peak * learning_rate_factor(at, warmup_steps=3, max_steps=steps) for at, (peak, steps) in enumerate(settings)
    ]
    assert list(rates(events, finished).values()) == pytest.approx(expected)
    notes = finished.with_name("notes")
    notes.mkdir()
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*") if path.is_file()}
    assert typed(finished, *options, GPT2_REPRO_SUPERVISED=str(notes)).returncode == 0
    # The supervisor may evaluate and copy the run.
    assert (notes / "run").read_text(encoding="utf-8") == str(finished.resolve())
    assert typed(finished, *options[:6]).returncode == 0  # the change is now part of the run
    assert typed(finished).returncode == 2 == typed(finished, *options, "--optim", "muon").returncode
    assert {path: path.stat().st_mtime_ns for path in finished.rglob("*") if path.is_file()} == before

    # Go back before the change and train to the original end: the same run, with newer checkpoints set aside.
    train(finished, "--keep_checkpoints", 0, "--resume_from", "checkpoint-4", "--allow_resume_change")
    left = {"checkpoint-4", "checkpoint-8", *(f"abandoned-checkpoint-{step}" for step in (8, 12, 16))}
    assert {path.name for path in finished.glob("*checkpoint-*")} == left
    assert weights(finished) == weights(straight)
    told = status(finished)
    assert told["time_breakdown"]["redone"] > 0 and told["max_steps"] == 8 == events(finished)[-1]["step"]
    assert sum(told["time_breakdown"].values()) == pytest.approx(told["seconds"], abs=0.05)


def test_another_validation_text_is_another_run(tiny_recipe: Path, type_warm, tmp_path: Path) -> None:
    """Losses of two texts never form one curve unnoticed, for the split validation and for further sets."""
    data = yaml.safe_load(tiny_recipe.read_text(encoding="utf-8"))["data"]
    section = data | {"split": "source", "tokenizer": f"{data['dataset_dir']}/tokenizer"}
    train_text = write_jsonl(tmp_path / "train.jsonl", ["one two three four " * 30] * 40)
    held_out = tmp_path / "val.jsonl"
    books = tmp_path / "books.jsonl"
    section["data_files"] = [train_text, str(held_out)]
    section["validation_sets"] = [f"books={books}"]
    section["dataset_dir"] = str(tmp_path / "data")
    recipe = yaml.safe_load(tiny_recipe.read_text(encoding="utf-8"))
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe | {"data": section}), encoding="utf-8")
    run = tmp_path / "two_texts"

    def start(*options: object) -> CompletedProcess[str]:
        words = ("train.py", tmp_path / "recipe.yaml", "--output_dir", run, "--stop_at_step", 4, *options)
        return type_warm("python", *words)

    def prepare_with(validation: str, further: str) -> dict[str, str]:
        write_jsonl(held_out, [validation * 30] * 5)
        write_jsonl(books, [further * 30] * 5)
        return prepare(DataArguments(**section), PreparationOptions(overwrite=True)).manifest.sha256

    first = prepare_with("five six ", "seven eight ")
    assert start().returncode == 0
    for texts, split in ((("six six ", "seven eight "), "validation"), (("five six ", "eight "), "validation_books")):
        changed = prepare_with(*texts)
        assert changed["train"] == first["train"] and changed[split] != first[split]
        before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
        done = start()
        assert done.returncode == 2 and "--allow_resume_change" in done.stderr
        assert split in done.stderr and first[split][:8] in done.stderr and changed[split][:8] in done.stderr
        assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
    assert start("--allow_resume_change", "--stop_at_step", 8).returncode == 0
    assert json.loads((run / "environment.json").read_text(encoding="utf-8"))["run_identity"]["validation"] == {
        split: sha256 for split, sha256 in changed.items() if split != "train"
    }


def test_run_stops_at_its_budget_and_resumes_with_a_larger_one(train, typed, events, tmp_path: Path) -> None:
    run = tmp_path / "run"
    money = ("--usd_per_hour", 3600, "--save_steps", 100, "--save_minutes", 1e-6, "--keep_checkpoints", 0)
    assert typed(run, *money, "--max_usd", 0.1).returncode == 0
    told = status(run)
    assert (told["state"], told["reason"], told["step"]) == ("stopped", "--max_usd 0.1", 1)
    assert told["seconds"] > 0.1 and (run / "checkpoint-1" / "manifest.json").is_file()
    train(run, *money)
    assert len(list(run.glob("checkpoint-*"))) == 8  # a checkpoint was due after each step
    assert status(run)["seconds"] > told["seconds"]  # the time of both attempts is counted
    assert list(rates(events, run)) == list(range(1, 9)) and events(run)[-2]["usd"] > told["seconds"]


def test_an_older_final_model_is_not_the_result(finished: Path, train) -> None:
    """A machine can disappear after it has copied the last checkpoint, and before it has copied final/."""
    for record in (finished / "environment.json", finished / "checkpoint-8" / "manifest.json"):
        document = json.loads(record.read_text(encoding="utf-8"))
        document["run_identity"]["learning_rate"] = 2e-2
        document |= {"sha256": manifest_hash(document)}
        record.write_text(json.dumps(document), encoding="utf-8")
    train(finished, "--learning_rate", 2e-2)
    manifest = json.loads((finished / "final" / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["environment"]["run_identity"]["learning_rate"] == 2e-2


def test_supervised_run_goes_back_only_once(finished: Path, typed, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()
    for stop, start in ((5, 4), (6, 5)):  # a supervisor starts the same command repeatedly
        words = ("--resume_from", "checkpoint-4", "--stop_at_step", stop)
        done = typed(finished, *words, GPT2_REPRO_SUPERVISED=str(notes))
        assert done.returncode == 0 and f"{finished}/checkpoint-{start}\n" in done.stdout, done.stdout
    assert (notes / "run").read_text(encoding="utf-8") == str(finished)


def test_model_card_has_only_measurements_of_its_weights(finished: Path, train, events) -> None:
    given_up = status(finished)["eval_loss"]
    train(finished, "--eval_strategy", "no", "--save_strategy", "no", "--resume_from", "checkpoint-4")
    (kept,) = [event["eval_loss"] for event in events(finished) if event["step"] == 4 and "eval_loss" in event]
    assert kept != given_up and status(finished)["eval_loss"] == kept and not (finished / "checkpoint-8").exists()
    card = (finished / "final" / "README.md").read_text(encoding="utf-8")
    assert "| tokens | 2,048 |" in card and "validation loss" not in card  # step 8 was not validated


@pytest.mark.parametrize("left", ["checkpoint-8", "nothing"])
def test_damaged_final_model_is_rewritten_or_reported(finished: Path, straight: Path, typed, left: str) -> None:
    (finished / "final" / "model.safetensors").unlink()
    for checkpoint in finished.glob("checkpoint-*"):
        if checkpoint.name != left:
            shutil.rmtree(checkpoint)
    metrics = (finished / "metrics.jsonl").read_text(encoding="utf-8")
    again = typed(finished)
    assert (finished / "metrics.jsonl").read_text(encoding="utf-8") == metrics
    assert status(finished)["state"] == "complete"
    if left == "nothing":
        assert again.returncode == 2 and f"{finished}/final" in again.stderr
    else:
        assert again.returncode == 0 and weights(finished) == weights(straight)


def test_run_killed_after_its_final_model_was_written_is_complete(finished: Path, typed) -> None:
    for checkpoint in finished.glob("checkpoint-*"):
        shutil.rmtree(checkpoint)
    path = finished / "run_status.json"
    path.write_text(json.dumps(status(finished) | {"state": "running"}), encoding="utf-8")
    files = [file for file in finished.rglob("*") if file.is_file() and file.name not in (".lock", path.name)]
    before = {file: file.stat().st_mtime_ns for file in files}
    longer = typed(finished, "--max_steps", 12, "--allow_resume_change")
    assert longer.returncode == 2 and "no checkpoint" in longer.stderr and status(finished)["state"] == "running"
    assert typed(finished, "--save_strategy", "no").returncode == 0
    assert (status(finished)["state"], status(finished)["step"]) == ("complete", 8)
    assert before == {file: file.stat().st_mtime_ns for file in files}


def test_folder_that_is_not_a_run_directory_is_refused(typed, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    for name in ("final", "staging", "trash-mine"):
        (theirs / name / "thesis").mkdir(parents=True)
    before = {*theirs.rglob("*")}
    refused = typed(theirs)
    assert refused.returncode == 2 and "--output_dir" in refused.stderr
    assert before == {*theirs.rglob("*")}


def test_finetuning_keeps_the_shape_and_the_learning_rate(straight, type_warm, tiny_data, events, tmp_path) -> None:
    run = tmp_path / "tuned"
    form = ("--dataset_dir", tiny_data, "--sequence_length", 32, "--separator", "before", "--tokens_per_step", 256)
    form += ("--use_cpu", "--bf16", "false", "--dataloader_num_workers", 0, "--per_device_train_batch_size", 8)
    shutil.copytree(straight / "final", tmp_path / "start")
    words = ("recipes/finetune_shakespeare.yaml", "--init_from", tmp_path / "start", "--output_dir", run, *form)
    words += ("--max_steps", 20, "--sample_prompt", "")
    done = type_warm("python", "train.py", *words, "--stop_at_step", 10)
    assert done.returncode == 0, done.stderr
    shutil.rmtree(tmp_path / "start")  # as on another machine
    done = type_warm("python", "train.py", *words)
    assert done.returncode == 0, done.stderr
    environment = json.loads((run / "environment.json").read_text(encoding="utf-8"))
    shape = [environment["run_identity"][name] for name in ("n_layer", "n_head", "n_embd")]
    assert environment["startup"] and shape == [2, 2, 32]  # the checkpoint's
    card = (run / "final" / "README.md").read_text(encoding="utf-8")
    assert "the weights of a local model" in card and "`start`" not in card
    logged = events(run)
    assert {event["learning_rate"] for event in logged if "loss" in event} == {3e-5}
    losses = {event["step"]: event["eval_loss"] for event in logged if "eval_loss" in event}
    before = [event["eval_loss"] for event in events(straight) if "eval_loss" in event]
    assert losses[0] == pytest.approx(before[-1], abs=1e-5) and list(losses) == [0, 5, 10, 15, 20]
    best = min((step for step in losses if step), key=lambda step: losses[step])
    kept = {path.name for path in run.glob("checkpoint-*")}
    assert kept == {"checkpoint-20", f"checkpoint-{best}"} and losses[best] < losses[0]

"""Runs that stop early, go back, go further, or go on with a change."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from gpt2_repro.card import add_results
from gpt2_repro.compute import learning_rate_factor
from gpt2_repro.evaluation.provenance import trace
from gpt2_repro.export import main as export


def status(run: Path) -> dict:
    return json.loads((run / "run_status.json").read_text())


@pytest.fixture(scope="module")
def finished(train, tmp_path_factory) -> Path:
    return train(tmp_path_factory.mktemp("going") / "run", "--save_steps", 4, "--keep_checkpoints", 0)


def test_a_finished_run_is_extended_along_a_schedule_of_its_own(
    finished: Path, train, events, type_warm, tiny_recipe: Path
) -> None:
    options = ("--save_steps", 4, "--keep_checkpoints", 0, "--extend_to", 16 * 256)
    train(finished, *options)
    told = status(finished)
    assert (told["state"], told["step"], told["max_steps"], told["tokens"]) == ("complete", 16, 16, 16 * 256)
    logged = {event["step"]: event["learning_rate"] for event in events(finished) if "loss" in event}
    expected = [
        learning_rate_factor(step, warmup_steps=3, max_steps=8, extensions=[[8, 16]]) * 1e-2 for step in range(16)
    ]
    assert [logged[step] for step in range(1, 17)] == pytest.approx(expected)
    notes = finished.with_name("notes")
    notes.mkdir()
    again = type_warm(
        "python", "train.py", tiny_recipe, "--output_dir", finished, *options, GPT2_REPRO_SUPERVISED=str(notes)
    )
    assert again.returncode == 0 and "is already complete" in again.stdout
    assert (notes / "run").read_text() == str(finished.resolve())  # whoever supervises it may evaluate and copy it
    without = type_warm("python", "train.py", tiny_recipe, "--output_dir", finished)
    assert without.returncode == 0 and "is already complete" in without.stdout

    # Back before the extension, and to the first end once more: the same run as at first, newer checkpoints set aside.
    first = load_file(finished / "checkpoint-8" / "model.safetensors")
    words = ("--output_dir", finished, "--save_steps", 4, "--keep_checkpoints", 0, "--resume_from", "checkpoint-4")
    back = type_warm("python", "train.py", tiny_recipe, *words)
    assert back.returncode == 0, back.stderr
    assert back.stdout.count("set aside: ") == 3 and "resuming from" in back.stdout
    assert {path.name for path in finished.glob("*checkpoint-*")} == {
        *("checkpoint-4", "checkpoint-8"),
        *("abandoned-checkpoint-8", "abandoned-checkpoint-12", "abandoned-checkpoint-16"),
    }
    second = load_file(finished / "checkpoint-8" / "model.safetensors")
    assert all((weight == second[name]).all() for name, weight in first.items())
    told = status(finished)
    assert told["accounts"]["redone"] > 0 and sum(told["accounts"].values()) == pytest.approx(
        told["seconds"], abs=0.05
    )
    assert told["max_steps"] == 8 and [event["step"] for event in events(finished)][-1] == 8


def test_a_budget_stops_with_a_checkpoint_and_more_of_it_goes_on(
    train, type_warm, tiny_recipe: Path, events, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    money = ("--usd_per_hour", 3600, "--save_steps", 100, "--save_minutes", 1e-6, "--keep_checkpoints", 0)
    done = type_warm("python", "train.py", tiny_recipe, "--output_dir", run, *money, "--max_usd", 0.5)
    assert done.returncode == 0, done.stderr
    told = status(run)
    assert (told["state"], told["reason"], told["step"]) == ("stopped", "--max_usd 0.5", 1)
    assert told["seconds"] > 0.5 and (run / "checkpoint-1" / "manifest.json").is_file()
    train(run, *money)
    assert len(list(run.glob("checkpoint-*"))) == 8  # one was due after each step
    assert status(run)["seconds"] > told["seconds"]  # both attempts were paid for
    assert [event["step"] for event in events(run) if "loss" in event] == list(range(1, 9))


def test_a_change_is_refused_unless_it_is_allowed(train, type_warm, tiny_recipe: Path, events, tmp_path: Path) -> None:
    run = train(tmp_path / "run", "--stop_at_step", 4)
    train(run, "--stop_at_step", 4)  # it is there already
    told = status(run)
    assert (told["state"], told["reason"], told["step"]) == ("stopped", "--stop_at_step 4", 4)
    words = ("python", "train.py", tiny_recipe, "--output_dir", run, "--learning_rate", 2e-2)
    refused = type_warm(*words)
    assert refused.returncode == 2 and "learning_rate 0.01 -> 0.02" in refused.stderr
    assert "--allow_resume_change" in refused.stderr
    allowed = type_warm(*words, "--allow_resume_change")
    assert allowed.returncode == 0, allowed.stderr
    assert "goes on as another run: learning_rate 0.01 -> 0.02" in allowed.stdout
    logged = {event["step"]: event["learning_rate"] for event in events(run) if "loss" in event}
    assert logged[5] == pytest.approx(2e-2 * learning_rate_factor(4, warmup_steps=3, max_steps=8))
    finished = type_warm(*words)  # from now on this is the run
    assert finished.returncode == 0 and "is already complete" in finished.stdout


def test_a_supervised_run_goes_back_once(train, type_warm, tiny_recipe: Path, tmp_path: Path) -> None:
    run = train(tmp_path / "run", "--save_steps", 2, "--stop_at_step", 6, "--keep_checkpoints", 0)
    notes = tmp_path / "notes"
    notes.mkdir()
    words = (
        "python",
        "train.py",
        tiny_recipe,
        "--output_dir",
        run,
        "--save_steps",
        2,
        "--resume_from",
        "checkpoint-2",
    )
    for stop, start in ((5, 2), (6, 5), (7, 6)):  # as a supervisor starts it again and again
        done = type_warm(*words, "--stop_at_step", stop, GPT2_REPRO_SUPERVISED=str(notes))
        assert done.returncode == 0 and f"resuming from {run}/checkpoint-{start}\n" in done.stdout, done.stdout
    assert (notes / "run").read_text() == str(run)


def test_a_run_that_is_neither_validated_nor_saved_has_its_card(train, tmp_path: Path) -> None:
    run = train(tmp_path / "run", "--eval_strategy", "no", "--save_strategy", "no")
    assert status(run)["tokens"] == 8 * 256 and not list(run.glob("checkpoint-*"))
    assert "| tokens | 2,048 |" in (run / "final" / "README.md").read_text()


def test_the_card_says_nothing_of_weights_that_were_given_up(train, events, tmp_path: Path) -> None:
    run = train(tmp_path / "run", "--eval_steps", 2, "--save_steps", 2, "--stop_at_step", 4)
    given_up = status(run)["eval_loss"]
    train(run, "--eval_strategy", "no", "--resume_from", "checkpoint-2")
    (kept,) = [event["eval_loss"] for event in events(run) if event["step"] == 2 and "eval_loss" in event]
    assert kept != given_up and status(run)["eval_loss"] == kept
    assert "validation loss" not in (run / "final" / "README.md").read_text()  # step 8 was not validated


def test_the_record_of_final_is_its_own(train, type_warm, tiny_recipe: Path, tmp_path: Path) -> None:
    """The card of an old final/ once showed the tokens and the loss of a run that had continued."""
    run = train(tmp_path / "run", "--keep_checkpoints", 0)
    before = (run / "final" / "README.md").read_text()
    words = ["python", "train.py", tiny_recipe, "--output_dir", run, "--keep_checkpoints", 0]
    stopped = type_warm(*words, "--extend_to", 16 * 256, "--stop_at_step", 12)
    assert stopped.returncode == 0 and status(run)["step"] == 12
    assert trace(str(run / "final")).tokens_trained == 8 * 256
    assert trace(str(run / "checkpoint-12")).tokens_trained == 12 * 256
    comparison = {"limit": None, "baseline": None, "rows": []}
    add_results(run / "final", trace(str(run / "final")).record, comparison)
    export([str(run / "final"), str(tmp_path / "run2")])
    assert (run / "final" / "README.md").read_text() == before
    assert (tmp_path / "run2" / "README.md").read_text() == before.replace("# run\n", "# run2\n").replace(
        '("run")', '("run2")'
    )
    add_results(run / "final", {"sha256": "of other weights"}, comparison)
    assert (run / "final" / "README.md").read_text() == before


@pytest.mark.parametrize("left", ["checkpoint-8", "nothing"])
def test_a_damaged_final_is_written_again_or_named(
    train, type_warm, tiny_recipe: Path, tmp_path: Path, left: str
) -> None:
    run = train(tmp_path / "run")
    weights = load_file(run / "final" / "model.safetensors")
    (run / "final" / "model.safetensors").unlink()
    for checkpoint in run.glob("checkpoint-*"):
        if checkpoint.name != left:
            shutil.rmtree(checkpoint)
    metrics = (run / "metrics.jsonl").read_text()
    again = type_warm("python", "train.py", tiny_recipe, "--output_dir", run)
    if left == "nothing":
        assert again.returncode == 2 and "final is damaged (model.safetensors" in again.stderr
        assert (run / "metrics.jsonl").read_text() == metrics and status(run)["state"] == "complete"
    else:
        assert again.returncode == 0 and status(run)["state"] == "complete"
        assert all((weights[name] == its).all() for name, its in load_file(run / "final/model.safetensors").items())


def test_a_foreign_folder_is_not_trained_into(type_warm, tiny_recipe: Path, tmp_path: Path) -> None:
    for name in ("final", "staging", "trash-mine"):
        (tmp_path / "theirs" / name).mkdir(parents=True)
        (tmp_path / "theirs" / name / "thesis.txt").write_text("mine")
    (tmp_path / "theirs" / "metrics.jsonl").write_text('{"mine": 1}\n')
    before = {path: path.read_bytes() for path in (tmp_path / "theirs").rglob("*") if path.is_file()}
    refused = type_warm("python", "train.py", tiny_recipe, "--output_dir", tmp_path / "theirs")
    assert refused.returncode == 2 and "--output_dir" in refused.stderr
    assert before == {path: path.read_bytes() for path in (tmp_path / "theirs").rglob("*") if path.is_file()}

"""`train.py --diff_recipe` lists all fields that differ from another recipe."""

from pathlib import Path

import pytest
import yaml
from gpt2_repro.diff_recipe import Deviation, _group, compare_with_default, deviations

import train as train_story
from gpt2_repro.errors import UserError
from gpt2_repro.training.sizing import follow_data
from tests.sections import ROOT, parse_for_training


FAITHFUL = str(ROOT / "recipes" / "gpt2_124m.yaml")


def compare(*words: object, against: str = FAITHFUL) -> dict[str, Deviation]:
    found = deviations(follow_data(parse_for_training(*words)), parse_for_training(against))
    return {deviation.as_text()["field"]: deviation for deviation in found}


def test_a_difference_in_a_default_shows(tmp_path: Path) -> None:
    silent, loud = tmp_path / "silent.yaml", tmp_path / "loud.yaml"
    silent.write_text("model:\n  n_layer: 12\n", encoding="utf-8")
    loud.write_text("model:\n  dropout: 0.1\ntraining:\n  adam_epsilon: 1e-7\n", encoding="utf-8")
    found = compare(silent, against=str(loud))
    assert {name: (d.run, d.recipe) for name, d in found.items()} == {
        "model.dropout": (0.0, 0.1),
        "training.adam_epsilon": (1e-8, 1e-7),
    }


def test_every_difference_is_in_its_group_and_a_new_field_counts_as_learned() -> None:
    words = ("--save_steps", 7, "--eval_tokens", 1024, "--separator", "none", "--learning_rate", 5e-3, "--no_bf16")
    more = ("--optim", "adafactor", "--attn_implementation", "eager", "--split", "hash")
    assert {name: found.group for name, found in compare(FAITHFUL, *words, *more).items()} == {
        **dict.fromkeys(("data.separator", "training.optim", "training.learning_rate", "training.bf16"), "learned"),
        **dict.fromkeys(("data.split", "training.eval_tokens"), "measured"),
        **dict.fromkeys(("model.attn_implementation", "training.save_steps"), "neither"),
    }
    assert _group("training", "a_new_field") == "learned"


def test_the_length_of_a_run_is_compared_in_steps_and_tokens() -> None:
    by_steps = compare(FAITHFUL, "--max_steps", 2000)
    assert {name: (d.run, d.recipe) for name, d in by_steps.items()} == {
        "training.total_tokens": (1_048_576_000, 9_890_693_120),
        "training.max_steps": (2000, 18_865),
    }
    assert compare(FAITHFUL, "--max_steps", 18_865) == compare(FAITHFUL, "--total_tokens", 9_890_693_121) == {}


def test_a_prepared_folder_on_the_command_line_replaces_the_data_section(tiny_recipe: Path, tmp_path: Path) -> None:
    folder = yaml.safe_load(tiny_recipe.read_text(encoding="utf-8"))["data"]["dataset_dir"]
    found = compare(FAITHFUL, "--dataset_dir", folder, "--sequence_length", 32, "--tokens_per_step", 4096)
    assert found["data.source"].run == "files" and found["data.sequence_length"].run == 32
    assert compare(FAITHFUL, "--dataset_dir", tmp_path / "nowhere").keys() == {"data.dataset_dir"}


def test_the_command_needs_no_data_and_names_the_nearest_recipe(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    words = ["recipes/demo.yaml", "--dropout", "0.1", "--diff_recipe"]
    train_story.main([*words, "recipes/gpt2_124m.yaml"])
    lines = capsys.readouterr().out.splitlines()
    rows = {line.split()[0]: line.split()[1:] for line in lines if line.startswith("  ")}
    assert rows["model.dropout"] == ["0.1", "(recipe:", "0.0)"] and "training.tokens_per_step" in rows
    with pytest.raises(UserError, match=r"recipes/gpt2_124m\.yaml"):
        train_story.main([*words[:3], "--diff_recipe=recipes/gpt2_124.yaml"])


@pytest.mark.parametrize(
    ("words", "follows"),
    [
        ("check_124m", True),
        ("gpt2_124m --seed 7 --per_device_train_batch_size 16 --stop_at_step 1000", True),
        ("gpt2_124m --source fineweb-10bt-tokens --split source", True),
        ("gpt2_124m --source fineweb-edu-10bt", False),
        ("gpt2_124m --eval_tokens 1048576", False),
        ("gpt2_124m --learning_rate 5e-4", False),
        ("blog_wrap512", False),
    ],
)
def test_a_run_has_a_reference_unless_a_difference_changes_its_validation_loss(
    words: str, follows: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the result does not depend on the current folder
    recipe, *options = words.split()
    typed = [ROOT / "recipes" / f"{recipe}.yaml", *options]
    found = compare_with_default(parse_for_training(*typed))
    assert found["reference"] == ("llm.c" if follows else None)
    fields = {deviation["field"] for deviation in found["deviations"]}
    assert fields == {name for name, its in compare(*typed).items() if its.group == "learned"}


def test_a_recipe_with_derived_sizes_is_compared() -> None:
    found = compare(FAITHFUL, against=str(ROOT / "recipes" / "own_text.yaml"))
    sizes = [found[f"training.{name}"].recipe for name in ("tokens_per_step", "total_tokens", "max_steps")]
    assert sizes == [0, 0, 0] and found["training.max_steps"].run == 18_865

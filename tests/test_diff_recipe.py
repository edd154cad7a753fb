"""`train.py --diff_recipe`: what differs, defaults included, sorted by what it changes, each with what is known of it."""

import dataclasses
import json
from pathlib import Path

import pytest
import yaml

import train as train_story
from gpt2_repro.data.arguments import DataArguments
from gpt2_repro.diff_recipe import MEASURED, NEITHER, USED_WITH, Deviation, beside_default, deviations
from gpt2_repro.errors import UserError
from gpt2_repro.evaluation.arguments import EvaluationArguments
from gpt2_repro.known_effects import KNOWN_EFFECTS, UNKNOWN, known_effect
from gpt2_repro.model.arguments import ModelArguments
from gpt2_repro.recipe import parse_recipe
from gpt2_repro.training.arguments import PretrainingArguments


ROOT = Path(train_story.__file__).parent
FAITHFUL = str(ROOT / "recipes" / "gpt2_124m.yaml")
RECIPES = sorted(str(path) for path in (ROOT / "recipes").glob("*.yaml"))
SECTIONS = {
    "data": DataArguments,
    "model": ModelArguments,
    "training": PretrainingArguments,
    "evaluation": EvaluationArguments,
}
FIELDS = {field.name for cls in SECTIONS.values() for field in dataclasses.fields(cls)}


@pytest.fixture
def show(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """Runs train.py's story with --diff_recipe; returns its lines."""
    monkeypatch.chdir(ROOT)

    def run(*words: object, against: str = FAITHFUL) -> list[str]:
        train_story.main([*map(str, words), "--diff_recipe", against])
        return capsys.readouterr().out.splitlines()

    return run


def compare(*words: object, against: str = FAITHFUL) -> dict[str, Deviation]:
    run = parse_recipe([str(word) for word in words], sections=SECTIONS)
    return {found.name: found for found in deviations(run, parse_recipe([against], sections=SECTIONS))}


def test_no_deviation_is_one_line(show) -> None:
    assert show(FAITHFUL) == [f"{FAITHFUL} does not deviate from {FAITHFUL}"]


def test_a_flag_is_shown_with_both_values_and_its_effect(show) -> None:
    lines = show(FAITHFUL, "--dropout", "0.1")
    assert "--dropout" in lines[0]
    row = lines.index("What is learned") + 1
    assert lines[row].split() == ["model.dropout", "0.1", "(0.0)"]
    assert "3.6413" in lines[row + 1] and "another model" in lines[row + 1]
    assert "How it is measured" not in lines and not any(line.startswith("Changes neither") for line in lines)


def test_a_deviation_that_hides_in_a_default_shows(tmp_path: Path) -> None:
    silent, loud = tmp_path / "silent.yaml", tmp_path / "loud.yaml"
    silent.write_text("model:\n  n_layer: 12\n")
    loud.write_text("model:\n  dropout: 0.1\ntraining:\n  adam_epsilon: 1e-7\n")
    found = compare(silent, against=str(loud))
    assert {name: (d.run, d.recipe) for name, d in found.items()} == {
        "model.dropout": (0.0, 0.1),
        "training.adam_epsilon": (1e-8, 1e-7),
    }


def test_groups_in_their_order_and_what_changes_neither_by_name_only(show) -> None:
    words = ("--save_steps", 7, "--eval_tokens", 1024, "--separator", "none", "--learning_rate", 5e-3, "--no_bf16")
    lines = show(FAITHFUL, *words, "--optim", "adafactor", "--attn_implementation", "eager")
    names = [line.split()[0] for line in lines if line.startswith("  ") and "." in line.split()[0] and "(" in line]
    assert [name for name in names if name.count(".") == 1 and name.split(".")[0] in SECTIONS] == [
        "data.separator",
        "training.optim",
        "training.learning_rate",
        "training.bf16",
        "training.eval_tokens",
    ]
    assert lines.index("What is learned") < lines.index("How it is measured")
    assert "Changes neither: model.attn_implementation, training.save_steps" in lines


def test_every_field_of_training_is_in_the_group_that_it_belongs_to() -> None:
    learned = {
        key
        for key in {field.name for field in dataclasses.fields(PretrainingArguments)}
        - PretrainingArguments.refused.keys()
        if key not in MEASURED and not key.startswith(NEITHER)
    }
    unknown = {"optim_args", "optim_target_modules", "tf32", "skip_loss_z", "skip_grad_z", "extend_to"}
    assert learned - KNOWN_EFFECTS.keys() == unknown
    assert {"learning_rate", "weight_decay", "warmup_steps", "tokens_per_step", "bf16", "seed", "optim"} <= learned
    assert not any(key.startswith(NEITHER) for key in learned)


def test_an_effect_that_nobody_measured_is_not_invented() -> None:
    assert compare(FAITHFUL, "--adam_beta1", 0.8)["training.adam_beta1"].effect == UNKNOWN
    assert compare(FAITHFUL, "--tf32", "true")["training.tf32"].effect == UNKNOWN
    assert compare(FAITHFUL, "--adam_beta2", 0.999)["training.adam_beta2"].effect.endswith(UNKNOWN)


@pytest.mark.parametrize(
    ("flag", "value", "effect"),
    [
        ("--learning_rate", 5e-3, "unstable"),
        ("--learning_rate", 5e-5, "converged poorly"),
        ("--learning_rate", 5e-4, UNKNOWN),
        ("--source", "fineweb-edu-10bt", "LAMBADA 9 to 12 points"),
        ("--source", "files", UNKNOWN),
        ("--separator", "none", "wikitext"),
        ("--separator", "after", UNKNOWN),
        ("--sequence_length", 512, "max_length 512"),
        ("--tokens_per_step", 65536, "nanoGPT#411"),
        ("--tokens_per_step", 1048576, UNKNOWN),
        ("--optim", "adamw_torch", "rounding"),
        ("--optim", "adafactor", UNKNOWN),
    ],
)
def test_the_effect_depends_on_the_values(flag: str, value: object, effect: str) -> None:
    found = compare(FAITHFUL, flag, value)
    assert effect in next(d.effect for name, d in found.items() if name.endswith("." + flag.removeprefix("--")))


def test_a_length_is_compared_as_what_it_comes_to() -> None:
    by_steps = compare(FAITHFUL, "--max_steps", 2000)
    assert {name: (d.run, d.recipe) for name, d in by_steps.items()} == {
        "training.total_tokens": (1_048_576_000, 9_890_693_120),
        "training.max_steps": (2000, 18_865),
    }
    assert compare(FAITHFUL, "--max_steps", 18_865) == compare(FAITHFUL, "--total_tokens", 9_890_693_121) == {}
    doubled = compare(FAITHFUL, "--tokens_per_step", 2 * 524_288)
    assert (doubled["training.max_steps"].run, doubled["training.max_steps"].recipe) == (9432, 18_865)


def test_what_a_split_does_not_use_changes_neither() -> None:
    groups = {name: d.group for name, d in compare(FAITHFUL, "--validation_fraction", 0.1, "--split_seed", 1).items()}
    assert groups == {"data.validation_fraction": "neither", "data.split_seed": "neither"}
    found = compare(FAITHFUL, "--split", "hash", "--validation_fraction", 0.1, "--validation_tokens", 5)
    assert [d.group for d in found.values()] == ["measured", "neither", "measured"]
    assert list(found) == ["data.split", "data.validation_tokens", "data.validation_fraction"]


def test_a_typed_folder_is_the_data_whatever_the_recipe_says(show, tiny_recipe: Path, tmp_path: Path) -> None:
    folder = yaml.safe_load(tiny_recipe.read_text())["data"]["dataset_dir"]
    found = compare(FAITHFUL, "--dataset_dir", folder)
    assert found["data.source"].run == "files" and found["data.sequence_length"].run == 32
    assert f"The data section is that of {folder}'s manifest." in " ".join(show(FAITHFUL, "--dataset_dir", folder))
    text = " ".join(show(FAITHFUL, "--dataset_dir", tmp_path / "nowhere"))
    assert "is not prepared here" in text and "Changes neither: data.dataset_dir" in text


@pytest.mark.parametrize("form", [["--diff_recipe", "recipes/gpt2_124.yaml"], ["--diff_recipe=recipes/gpt2_124.yaml"]])
def test_an_unknown_recipe_names_the_nearest(form: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(UserError, match="there is no recipe recipes/gpt2_124.yaml: did you mean 'recipes/gpt2_124m"):
        train_story.main(["--dataset_dir", "data/nowhere", *form])


def test_no_line_is_wider_than_the_terminal(show, tmp_path: Path) -> None:
    long = tmp_path / ("a_name_that_goes_on_" * 4 + ".yaml")
    document = {
        "data": {
            "data_files": ["/a/very/long/folder/of/texts/*.jsonl.gz"] * 5,
            "source": "files",
            "tokenizer": "x/" * 40,
        },
        "training": {"final_learning_rate_fraction": 0.123456789012345678, "seed": 123456789},
        "evaluation": {"tasks": ["a_task_with_a_name"] * 9, "baseline": "y/" * 40},
    }
    long.write_text(json.dumps(document))
    for recipe in [*RECIPES, str(long)]:
        for other in [*RECIPES, str(long)]:
            lines = show(recipe, "--run_name", "n" * 90, "--logging_steps", 3, against=other)
            assert len(lines) > 1 and max(map(len, lines)) <= 120, max(lines, key=len)


def test_every_known_effect_is_one_short_line_about_a_field_that_exists() -> None:
    assert KNOWN_EFFECTS.keys() <= FIELDS
    assert MEASURED | USED_WITH.keys() <= KNOWN_EFFECTS.keys()
    assert all(any(field.startswith(beginning) for field in FIELDS) for beginning in NEITHER)
    numbers = (0, 1e-5, 5e-4, 1.5e-3, 1, 10**6, 10**10)
    words = ("none", "before", "fineweb-10bt", "fineweb-edu-10bt", "openwebtext", "adamw_torch", "adafactor", "no")
    named = {"source", "separator", "optim", "eval_strategy"}
    for field in KNOWN_EFFECTS:
        values = words if field in named else numbers
        for effect in {known_effect(field, run, recipe) for run in values for recipe in values}:
            assert 10 < len(effect) <= 110 and "\n" not in effect, effect


def test_as_typed_it_needs_no_data_and_exits_0(type_command) -> None:
    done = type_command("python", "train.py", "recipes/demo.yaml", "--diff_recipe", "recipes/gpt2_124m.yaml")
    assert done.returncode == 0 and done.stderr == ""
    assert "training.tokens_per_step" in done.stdout and "docs/recipes.md" in done.stdout


@pytest.mark.parametrize(
    ("words", "follows"),
    [
        ([FAITHFUL], True),
        ([str(ROOT / "recipes" / "check_124m.yaml")], True),
        ([FAITHFUL, "--seed", "7", "--per_device_train_batch_size", "16", "--stop_at_step", "1000"], True),
        ([FAITHFUL, "--source", "fineweb-10bt-tokens", "--split", "source"], True),
        ([FAITHFUL, "--source", "fineweb-edu-10bt"], False),
        ([FAITHFUL, "--eval_tokens", "1048576"], False),
        ([FAITHFUL, "--split", "hash"], False),
        ([FAITHFUL, "--learning_rate", "5e-4"], False),
        ([FAITHFUL, "--total_tokens", "1e9"], False),
        ([str(ROOT / "recipes" / "blog_wrap512.yaml")], False),
    ],
    ids=lambda value: " ".join(value).replace(str(ROOT), "") if isinstance(value, list) else str(value),
)
def test_a_run_has_a_reference_where_nothing_moves_its_validation_loss(
    words: list[str], follows: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # wherever it is typed
    found = beside_default(parse_recipe(words, sections=SECTIONS))
    assert found["reference"] == ("llm.c" if follows else None)
    fields = {deviation["field"] for deviation in found["deviations"]}
    assert fields == {name for name, its in compare(*words).items() if its.group == "learned"}

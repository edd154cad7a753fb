"""Recipes and command lines are one set of values; differences between recipes show."""

import re
from pathlib import Path

import pytest

import train
from gpt2_repro.batch_plan import TokenCount
from gpt2_repro.training.deviations import compare_with_default
from tests.sections import ROOT, parse_for_training


FAITHFUL = str(ROOT / "recipes" / "gpt2_124m.yaml")


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    training = "training:\n  total_tokens: 10e9\n  bf16: false\n  report_to: [wandb, tensorboard]\n"
    path.write_text(f"model:\n  n_layer: 3\n{training}", encoding="utf-8")
    return path


def test_the_file_sets_values_and_the_command_line_wins(recipe: Path) -> None:
    def parse(*words: object) -> list:
        parsed = parse_for_training(recipe, *words)
        training = parsed.training
        return [parsed.model.n_layer, training.total_tokens, training.bf16, training.report_to, training.seed]

    assert parse() == [3, 10_000_000_000, False, ["wandb", "tensorboard"], 42]
    words = ("--n-layer", "4", "--total_tokens=1_000_000_000", "--bf16", "--report_to", "none")
    assert parse(*words)[:3] == [4, 1_000_000_000, True] and parse(*words)[3] in ("none", ["none"])


def test_token_counts_are_exact_whole_numbers() -> None:
    assert {TokenCount(text) for text in ("10e9", "10_000_000_000", "10,000,000,000", 10**10, 1e10)} == {10**10}
    for text in ("1.5", "-3", "many", "nan"):
        with pytest.raises(ValueError):
            TokenCount(text)


def test_a_run_is_named_by_the_recipe_and_the_options(recipe: Path) -> None:
    assert parse_for_training(recipe).title == "run"
    words = ("--seed", 7, "--n_layer=4", "--output_dir", "elsewhere")
    assert parse_for_training(recipe, *words).title == "run n_layer=4 seed=7"


@pytest.mark.parametrize("command", ["train.py", "prepare_data.py"])
def test_help_needs_no_torch(command: str, type_command) -> None:
    done = type_command("python", "-X", "importtime", command, "--help")
    assert done.returncode == 0 and len(re.findall(r"^  --[a-z]", done.stdout, re.MULTILINE)) > 20
    assert not re.search(r"\| +torch$", done.stderr, re.MULTILINE)


def test_diff_recipe_prints_both_values_and_needs_no_data(
    tiny_data: Path, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for words, field, values in (
        ([str(ROOT / "recipes" / "demo.yaml"), "--dropout", "0.1"], "dropout", ["0.1", "0.0"]),
        ([FAITHFUL, "--adam_epsilon", "1e-7"], "adam_epsilon", ["1e-07", "1e-08"]),
        (
            [FAITHFUL, "--dataset_dir", str(tiny_data), "--sequence_length", "32", "--tokens_per_step", "4096"],
            "source",
            ["files"],
        ),
    ):
        train.main([*words, "--diff_recipe", FAITHFUL])
        shown = capsys.readouterr().out
        assert any(all(word in line for word in (field, *values)) for line in shown.splitlines()), shown


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
def test_only_a_run_on_llmcs_curve_has_a_reference(words: str, follows: bool) -> None:
    name, *options = words.split()
    run = parse_for_training(ROOT / "recipes" / f"{name}.yaml", *options)
    assert compare_with_default(run)["reference"] == ("llm.c" if follows else None)

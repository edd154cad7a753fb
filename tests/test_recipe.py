"""A recipe and a command line are one text: same validation, the command line wins, mistakes name the nearest word."""

import dataclasses
from pathlib import Path
from typing import ClassVar, Literal

import pytest

from gpt2_repro.batch_plan import TokenCount
from gpt2_repro.errors import UserError
from gpt2_repro.recipe import parse_recipe


@dataclasses.dataclass
class Shape:
    num_layers: int = dataclasses.field(default=2, metadata={"help": "Layers of the thing."})
    kind: Literal["round", "square"] = dataclasses.field(default="round", metadata={"help": "Its form."})
    tokens: TokenCount = dataclasses.field(default=TokenCount(5), metadata={"help": "How many."})
    names: list[str] = dataclasses.field(default_factory=list, metadata={"help": "What to call it."})
    fast: bool = dataclasses.field(default=True, metadata={"help": "Whether it is fast."})
    owned: int = dataclasses.field(default=0, metadata={"help": "Somebody else's."})

    refused: ClassVar[dict[str, str]] = {"owned": "the neighbour decides it"}


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text("model:\n  num_layers: 3\n  tokens: 10e9\n  names: [a, b]\n  fast: false\ntraining:\n  x: 1\n")
    return path


def parse(*argv: object) -> dict:
    return vars(parse_recipe([str(word) for word in argv], model=Shape).model)


def test_the_file_speaks_and_the_command_line_wins(recipe: Path) -> None:
    expected = {"num_layers": 3, "kind": "round", "tokens": 10_000_000_000, "names": ["a", "b"]}
    assert parse(recipe) == expected | {"fast": False, "owned": 0}
    changed = parse(recipe, "--num-layers", "4", "--kind=square", "--tokens", "1_000", "--fast")
    assert (changed["num_layers"], changed["kind"], changed["tokens"], changed["fast"]) == (4, "square", 1000, True)


def test_token_counts_are_exact_whole_numbers() -> None:
    assert {TokenCount(text) for text in ("10e9", "10_000_000_000", "10,000,000,000", 10**10, 1e10)} == {10**10}
    for text in ("1.5", "-3", "many", "nan"):
        with pytest.raises(ValueError):
            TokenCount(text)


# tests/test_bad_input.py has the mistakes in real fields.
@pytest.mark.parametrize(
    ("text", "words", "told"),
    [
        ("", "--num_lay 3", "'--num_layers'"),  # no abbreviations
        ("", "--num_layers three", "'three'"),
        ("", "--owned=3", "the neighbour decides it"),
        ("", "stray", "stray"),
        ("modle:\n  num_layers: 3\n", "", "'model'"),
        ("model:\n  kind: sqare\n", "", "'square'"),
        ("model:\n  num_layer: 3\n", "", "'num_layers'"),
        ("model:\n  owned: 3\n", "", "the neighbour decides it"),
        ("model: 3\n", "", "'model'"),
        ("- 3\n", "", "sections"),
        ("model: [\n", "", "not YAML"),
        ("model: !!python/object/apply:os.system [true]\n", "", "not YAML"),
    ],
)
def test_a_mistake_is_one_line(recipe: Path, text: str, words: str, told: str) -> None:
    recipe.write_text(text or recipe.read_text())
    with pytest.raises(UserError) as error:
        parse(recipe, *words.split())
    assert told in str(error.value) and "\n" not in str(error.value)


def test_help_shows_own_options_only(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parse(recipe, "--help")
    shown = capsys.readouterr().out
    assert not stop.value.code
    assert "--num_layers" in shown and "(default: 2)" in shown and "--owned" not in shown


def test_a_run_is_named_by_the_recipe_and_what_was_typed(recipe: Path) -> None:
    for words, typed, title in (
        ([], set(), "run"),
        (["--tokens", "1_000", "--kind=square"], {"tokens", "kind"}, "run kind=square tokens=1000"),
        (["--num_layers", "4", "--no_fast"], {"num_layers", "fast"}, "run fast=False num_layers=4"),
    ):
        parsed = parse_recipe([str(recipe), *words], model=Shape)
        assert (parsed.typed, parsed.title) == (typed, title)

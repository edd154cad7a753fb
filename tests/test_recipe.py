"""A recipe and a command line are one text: same validation, the command line wins, mistakes name the nearest word."""

import dataclasses
from pathlib import Path
from typing import ClassVar, Literal

import pytest

from gpt2_repro.compute import TokenCount
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
    return parse_recipe([str(word) for word in argv], sections={"model": Shape}).values["model"]


def test_the_file_speaks_and_the_command_line_wins(recipe: Path) -> None:
    assert parse(recipe) == {
        "num_layers": 3,
        "kind": "round",
        "tokens": 10_000_000_000,
        "names": ["a", "b"],
        "fast": False,
        "owned": 0,
    }
    changed = parse(recipe, "--num-layers", "4", "--kind=square", "--tokens", "1_000", "--fast")
    assert (changed["num_layers"], changed["kind"], changed["tokens"], changed["fast"]) == (4, "square", 1000, True)


def test_what_was_typed_is_known(recipe: Path) -> None:
    parsed = parse_recipe([str(recipe), "--num_layers", "4", "--no_fast"], sections={"model": Shape})
    assert parsed.typed == {"num_layers", "fast"}


@pytest.mark.parametrize("text", ["10e9", "10_000_000_000", "10,000,000,000", 10**10, 1e10])
def test_token_counts_are_exact(text: object) -> None:
    assert TokenCount(text) == 10**10


@pytest.mark.parametrize("text", ["1.5", "-3", "many", "nan"])
def test_a_token_count_is_a_whole_number(text: str) -> None:
    with pytest.raises(ValueError):
        TokenCount(text)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--num_layer", "3"], "did you mean '--num_layers'?"),
        (["--num_lay", "3"], "did you mean '--num_layers'?"),  # no abbreviations
        (["--kind", "sqare"], "--kind cannot be 'sqare': did you mean 'square'?"),
        (["--num_layers", "three"], "invalid int value: 'three'"),
        (["--tokens", "1.5"], "--tokens"),
        (["--owned", "3"], "--owned has another owner: the neighbour decides it"),
        (["--owned=3"], "the neighbour decides it"),
        (["stray"], "stray"),
    ],
)
def test_mistakes_on_the_command_line(recipe: Path, words: list[str], message: str) -> None:
    with pytest.raises(UserError) as error:
        parse(recipe, *words)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("modle:\n  num_layers: 3\n", "did you mean 'model'?"),
        ("model:\n  num_layer: 3\n", "model has no key 'num_layer': did you mean 'num_layers'?"),
        ("model:\n  kind: sqare\n", "did you mean 'square'?"),
        ("model:\n  owned: 1\n", "model.owned has another owner: the neighbour decides it"),
        ("model: 3\n", "must hold keys and values"),
        ("- 3\n", "must hold the sections"),
        ("model: [\n", "is not YAML"),
        ("model: !!python/object/apply:os.system [true]\n", "is not YAML"),
    ],
)
def test_mistakes_in_the_file(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as error:
        parse(path)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_missing_recipe_names_the_nearest() -> None:
    with pytest.raises(UserError, match=r"there is no recipe recipes/gpt2_124.yaml: did you mean 'recipes/gpt2_124m"):
        parse("recipes/gpt2_124.yaml")


def test_help_shows_own_options_first(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parse(recipe, "--help")
    shown = capsys.readouterr().out
    assert stop.value.code == 0
    assert "--num_layers" in shown and "(default: 2)" in shown and "--owned" not in shown


def test_a_run_is_named_by_the_recipe_and_what_was_typed(recipe: Path) -> None:
    def title(*argv: object) -> str:
        return parse_recipe([str(word) for word in argv], sections={"model": Shape}).title

    assert title(recipe) == "run"
    assert title(recipe, "--tokens", "1_000", "--kind=square") == "run kind=square tokens=1000"

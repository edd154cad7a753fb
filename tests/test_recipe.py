"""Recipes and command-line options are checked by the same rules."""

import dataclasses
import re
from pathlib import Path
from typing import ClassVar, Literal

import pytest
import yaml
from gpt2_repro.recipe import load_sections, parse_recipe

import prepare_data
import train
from gpt2_repro.batch_plan import TokenCount
from gpt2_repro.cli import OTHER_NAMES
from gpt2_repro.data.arguments import PreparationOptions
from gpt2_repro.errors import UserError, nearest
from gpt2_repro.training.arguments import TrainingSection
from tests.sections import ROOT, SECTIONS


ALL = {"--num_layers", "--kind", "--tokens", "--names", "--fast", "--no_fast"}
LAUNCHERS_OPTIONS = {"config_file", "num_processes", "num_machines", "machine_rank"}


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
    path.write_text(
        "model:\n  num_layers: 3\n  tokens: 10e9\n  names: [a, b]\n  fast: false\ntraining:\n  x: 1\n",
        encoding="utf-8",
    )
    return path


def parse(*argv: object) -> dict:
    return vars(parse_recipe([str(word) for word in argv], model=Shape).model)


def test_the_file_speaks_and_the_command_line_wins(recipe: Path) -> None:
    expected = {"num_layers": 3, "kind": "round", "tokens": 10_000_000_000, "names": ["a", "b"]}
    assert parse(recipe) == expected | {"fast": False, "owned": 0}
    changed = parse(recipe, "--num-layers", "4e0", "--kind=square", "--tokens", "1_000", "--fast")
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
        *(("", f"--num_layers={text}", f"{text!r}.*--num_layers 2") for text in ("three", "1.5", "nan", "inf", "")),
        *(
            ("", f"--tokens={text}", f"{text!r}.*--tokens {fix}")
            for text, fix in (("1,5e3", 1500), ("-1", 5), ("nan", 5))
        ),
        ("", "--fast maybe", "'maybe'.*--fast true"),
        ("", "--num_layers", "--num_layers 2"),
        ("", "--owned=3", "the neighbour decides it"),
        ("", "stray", "stray"),
        ("modle:\n  num_layers: 3\n", "", "'model'"),
        ("model:\n  kind: sqare\n", "", "'square'"),
        ("model:\n  num_layer: 3\n", "", "'num_layers'"),
        ("model:\n  owned: 3\n", "", "the neighbour decides it"),
        ("model: 3\n", "", "'model'"),
        ("- 3\n", "", "sections"),
        ("model: [\n", "", "line 2, is not valid YAML"),
        ("model: !!python/object/apply:os.system [true]\n", "", "not valid YAML"),
    ],
)
def test_a_mistake_is_one_line(recipe: Path, text: str, words: str, told: str) -> None:
    recipe.write_text(text or recipe.read_text(encoding="utf-8"), encoding="utf-8")
    with pytest.raises(UserError) as error:
        parse(recipe, *words.split())
    assert re.search(told, str(error.value)) and "\n" not in str(error.value)


def test_help_shows_the_groups_or_all_options(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, options in ((["--help"], {"--num_layers"}), (["--help", "all"], ALL)):
        with pytest.raises(SystemExit) as stop:
            parse_recipe([str(recipe), *words], model=Shape, groups={"Form": ["num_layers"]})
        shown = capsys.readouterr().out
        assert not stop.value.code and "(default: 2)" in shown
        assert set(re.findall(r"^  (--\w+)", shown, re.MULTILINE)) == options


@pytest.mark.parametrize("command", ["train.py", "prepare_data.py"])
def test_help_needs_no_torch(command: str, type_command) -> None:
    for words, count in ((["--help"], range(18, 26)), (["--help", "all"], range(25, 400))):
        done = type_command("python", "-X", "importtime", command, *words)
        assert done.returncode == 0 and len(re.findall(r"^  --[a-z]", done.stdout, re.MULTILINE)) in count
        assert not re.search(r"\| +torch$", done.stderr, re.MULTILINE)


def test_options_of_other_projects_name_ours(recipe: Path) -> None:
    known = {field.name for cls in (*SECTIONS, PreparationOptions) for field in dataclasses.fields(cls)}
    known |= {"temperature", "num_samples", "max_new_tokens", "prompt"}  # of generate
    known |= {
        *train.OPTIONS,
        *prepare_data.OPTIONS,
        "no_bf16",
        "no_torch_compile",
        "n",
    } - TrainingSection.refused.keys()
    for table in yaml.safe_load(OTHER_NAMES.read_text(encoding="utf-8")).values():
        assert (ROOT / table.get("page", "README.md")).exists()
        names = [word for group in table.get("names", []) for word in group["names"].split()]
        assert len(names) == len(set(names))
        for ours in [*table.get("options", {}).values(), *(group["to"] for group in table.get("names", []))]:
            text = ours if isinstance(ours, str) else " ".join(ours)
            assert set(re.findall(r"--(\w+)", text)) <= known | LAUNCHERS_OPTIONS, text
    for word, ours in (("--batch_size=3", "--per_device_train_batch_size"), ("-d", "--tokens_per_step")):
        with pytest.raises(UserError, match=f"{ours} .*docs/from"):
            parse(recipe, word, 3)


@pytest.mark.parametrize(
    ("word", "near"),
    [("attn", "attn_implementation"), ("seq_len", "sequence_length"), ("optm", "optim")],
)
def test_abbreviations_come_before_similar_words(word: str, near: str) -> None:
    assert (
        nearest(f"--{word}", [f"--{field.name}" for cls in SECTIONS for field in dataclasses.fields(cls)])
        == f"--{near}"
    )


@pytest.mark.parametrize(
    ("named", "meant"),
    [
        ("recipes/gpt2_small.yaml", "124m"),
        ("gpt2_124m", "124m"),
        ("GPT2-xl", "1558m"),
        ("config/train_gpt2.py", "124m"),
    ],
)
def test_a_recipe_that_does_not_exist(named: str, meant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(UserError, match=f"'recipes/gpt2_{meant}.yaml'"):
        load_sections(Path(named))


def test_a_run_is_named_by_the_recipe_and_what_was_typed(recipe: Path) -> None:
    for words, typed, title in (
        ([], set(), "run"),
        (["--tokens", "1_000", "--kind=square"], {"tokens", "kind"}, "run kind=square tokens=1000"),
        (["--num_layers", "4", "--no_fast"], {"num_layers", "fast"}, "run fast=False num_layers=4"),
    ):
        parsed = parse_recipe([str(recipe), *words], model=Shape)
        assert (parsed.typed, parsed.title) == (typed, title)

"""Every command of docs/recipes.md parses, its data is prepared by a command there, and each ablation changes one thing."""

import re
import shlex
from pathlib import Path

import pytest

import prepare_data
import train as train_story
from gpt2_repro.data.arguments import DataArguments
from gpt2_repro.data.sources.opening import SOURCE_NAMES
from gpt2_repro.diff_recipe import deviations
from gpt2_repro.evaluation.arguments import parse_options
from gpt2_repro.recipe import ParsedRecipe, parse_recipe
from tests.sections import ROOT, SECTIONS


PAGE = (ROOT / "docs" / "recipes.md").read_text()
FINISHED_RUN = "runs/gpt2_124m/recipe.yaml"


def commands(story: str) -> list[list[str]]:
    """The words after `story` in every command of the page, in code blocks and in running text."""
    blocks = re.findall(r"^```bash\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()] + re.findall(r"`(train\.py [^`]+)`", PAGE)
    split = [shlex.split(line, comments=True) for line in lines]
    return [words[words.index(story) + 1 :] for words in split if story in words]


TRAININGS, PREPARATIONS, EVALUATIONS = (commands(story) for story in ("train.py", "prepare_data.py", "evaluate.sh"))


def parse(words: list[str], story: str) -> ParsedRecipe:
    words = ["recipes/gpt2_124m.yaml" if word == FINISHED_RUN else word for word in words]
    if story == "prepare_data.py":
        recipe = parse_recipe(words, sections={"data": DataArguments}, extras=prepare_data.EXTRAS)
    else:
        options = ("data", "model", "training")
        recipe = parse_recipe(words, sections=SECTIONS, options=options, extras=train_story.EXTRAS)
    DataArguments(**recipe.values["data"])
    assert recipe.values["data"]["source"] in SOURCE_NAMES
    return recipe


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("words", EVALUATIONS, ids=" ".join)
def test_every_evaluation_parses(words: list[str]) -> None:
    written = {run_name(training) for training in TRAININGS}
    assert set(parse_options(words, description=None).checkpoints) <= {f"runs/{name}" for name in written}


def run_name(words: list[str]) -> str:
    """The name of the run folder of a training."""
    typed = words[words.index("--output_dir") + 1] if "--output_dir" in words else words[0] if words else "gpt2_124m"
    return Path(typed).stem


@pytest.mark.parametrize("words", TRAININGS, ids=" ".join)
def test_each_training_has_its_data_prepared_and_changes_one_thing(words: list[str]) -> None:
    run = parse(words, "train.py")
    prepared = [parse(words, "prepare_data.py").values["data"] for words in PREPARATIONS]
    assert run.values["data"] in prepared
    if run.extras.diff_recipe:
        parse([run.extras.diff_recipe], "train.py")
    found = deviations(run, parse([str(run.path)], "train.py"))
    learned = {deviation.key for deviation in found if deviation.group == "learned"} - {"stop_at_step"}
    assert len(learned) <= 1 or learned == {"packing", "min_length"}
    assert not [deviation for deviation in found if deviation.group == "measured"]
    assert bool(learned) == (run.values["training"]["output_dir"] is not None), "a folder of its own"


def test_no_two_different_trainings_share_a_folder() -> None:
    by_folder: dict[str, set[tuple[str, ...]]] = {}
    for words in TRAININGS:
        if not {"--dry_run", "--diff_recipe"} & set(words):
            plain = [word for word in words if word not in ("--stop_at_step", "2000", "recipes/gpt2_124m.yaml")]
            by_folder.setdefault(run_name(words), set()).add(tuple(plain))
    assert all(len(forms) == 1 for forms in by_folder.values())
    assert len(by_folder) >= 14

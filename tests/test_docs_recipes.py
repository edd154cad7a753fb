"""Each documented run changes at most one property of its recipe file.

The documented runs are in docs/recipes.md and docs/lambada.md.
"""

import re
import shlex

import pytest
from gpt2_repro.diff_recipe import deviations
from gpt2_repro.recipe import Recipe, parse_recipe

import prepare_data
import train as train_script
from gpt2_repro.data.arguments import DataArguments
from gpt2_repro.training.arguments import load_recipe
from tests.sections import ROOT


ABLATIONS = (
    (ROOT / "docs" / "lambada.md").read_text(encoding="utf-8").partition("\n## Step 3: full-length ablations\n")[2]
)
PAGE = ((ROOT / "docs" / "recipes.md").read_text(encoding="utf-8") + ABLATIONS).replace(
    "\\\n", " "
)  # continued lines joined
FINISHED_RUN = "runs/gpt2_124m/recipe.yaml"


def commands(story: str) -> list[list[str]]:
    """Return the arguments of each documented command that runs a script.

    `story` is the name of the script, for example train.py.
    """
    blocks = re.findall(r"^```bash\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()] + re.findall(r"`(train\.py [^`]+)`", PAGE)
    split = [shlex.split(line, comments=True) for line in lines]
    return [words[words.index(story) + 1 :] for words in split if story in words]


TRAININGS, PREPARATIONS = commands("train.py"), commands("prepare_data.py")
assert ABLATIONS and len(TRAININGS) >= 25


def parse(words: list[str], script: str) -> Recipe:
    words = ["recipes/gpt2_124m.yaml" if word == FINISHED_RUN else word for word in words]
    if script == "prepare_data.py":
        return parse_recipe(words, data=DataArguments, options=prepare_data.OPTIONS)
    return load_recipe(words, options=train_script.OPTIONS)


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("words", TRAININGS, ids=" ".join)
def test_each_training_has_its_data_prepared_and_changes_one_thing(words: list[str]) -> None:
    run = parse(words, "train.py")
    prepared = [parse(words, "prepare_data.py").data for words in PREPARATIONS]
    assert run.data in prepared
    if run.options.diff_recipe:
        parse([run.options.diff_recipe], "train.py")
    found = deviations(run, parse([str(run.path)], "train.py"))
    learned = {deviation.key for deviation in found if deviation.group == "learned"} - {"stop_at_step"}
    assert len(learned) <= 1 or learned == {"packing", "min_length"}
    assert not [deviation for deviation in found if deviation.group == "measured"]
    assert bool(learned) == (run.training.output_dir is not None), "an ablation needs a separate --output_dir"

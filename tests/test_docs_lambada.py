"""docs/lambada.md is a plan that can be typed: each run passes --dry_run, finds its data, and changes one thing."""

import re
import shlex
from pathlib import Path

import pytest

import prepare_data
import train as train_story
from gpt2_repro.data.arguments import DataArguments
from gpt2_repro.data.manifest import form_of
from gpt2_repro.data.sources.opening import SOURCE_NAMES
from gpt2_repro.recipe import parse_recipe


ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "lambada.md").read_text()
BLOCKS = re.findall(r"^```bash\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
LINES = [shlex.split(line) for block in BLOCKS for line in block.splitlines()]


def commands(story: str) -> list[list[str]]:
    return [words[words.index(story) + 1 :] for words in LINES if story in words]


TRAININGS, PREPARATIONS = commands("train.py"), commands("prepare_data.py")
RUNS = [words[words.index("--output_dir") + 1] for words in TRAININGS]


def data_of(words: list[str], **options: object) -> DataArguments:
    recipe = parse_recipe(words, sections={"data": DataArguments}, **options)  # type: ignore[arg-type]
    return DataArguments(**recipe.values["data"])


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("words", TRAININGS, ids=" ".join)
def test_each_run_passes_dry_run_and_finds_its_data(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    train_story.main([*words, "--dry_run"])
    assert "2,000 = 1,048,576,000 tokens" in capsys.readouterr().out
    wanted = data_of(words, leave_others=True)
    prepared = [data_of(words, extras=prepare_data.EXTRAS) for words in PREPARATIONS]
    found = next(data for data in prepared if data.dataset_dir == wanted.dataset_dir)
    assert (found.source, form_of(found)) == (wanted.source, form_of(wanted))
    assert found.source in SOURCE_NAMES
    assert found.max_tokens - found.validation_tokens > 1_048_576_000


def test_six_runs_each_change_one_thing() -> None:
    assert len(RUNS) == len(set(RUNS)) == 6
    base = set(TRAININGS[0])
    changed = [
        {word for word in words if word.startswith("--")}
        - base
        - {"--sequence_length", "--min_length", "--train_sampling_strategy"}
        for words in TRAININGS[1:]
    ]
    assert changed == [{"--source"}, {"--dropout"}, {"--separator"}, {"--packing"}, {"--adam_beta2"}]

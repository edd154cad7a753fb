"""The commands of the six short training runs in docs/lambada.md are correct."""

import re
import shlex
from pathlib import Path

import pytest
from gpt2_repro.recipe import parse_recipe

import prepare_data
from gpt2_repro.data.arguments import DataArguments
from gpt2_repro.data.prepared import form_of
from gpt2_repro.training.arguments import load_recipe


ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "lambada.md").read_text(encoding="utf-8").replace("\\\n", " ")  # continued lines joined
LINES = [shlex.split(line) for line in PAGE.splitlines() if ".py --" in line]
TRAININGS, PREPARATIONS = (
    [words[words.index(script) + 1 :] for words in LINES if script in words]
    for script in ("train.py", "prepare_data.py")
)


def test_six_runs_find_their_data_and_each_changes_one_thing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    sections = [parse_recipe(words, data=DataArguments, options=prepare_data.OPTIONS).data for words in PREPARATIONS]
    prepared = {data.dataset_dir: data for data in sections}
    for words in TRAININGS:
        wanted = load_recipe(words).data
        found = prepared[wanted.dataset_dir]
        assert (found.source, form_of(found)) == (wanted.source, form_of(wanted))
        assert found.max_tokens - found.validation_tokens > 1_048_576_000
    options = [{word for word in words if re.match("--", word)} for words in TRAININGS]
    windows = {"--sequence_length", "--min_length", "--train_sampling_strategy"}
    changed = [sorted(its - options[0] - windows) for its in options[1:]]
    assert changed == [["--source"], ["--dropout"], ["--separator"], ["--packing"], ["--adam_beta2"]]
    assert len({words[words.index("--output_dir") + 1] for words in TRAININGS}) == 6

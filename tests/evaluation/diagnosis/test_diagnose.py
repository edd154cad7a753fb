"""`python -m gpt2_repro.diagnose` names a planted defect, and none where there is none."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from gpt2_repro import diagnose
from gpt2_repro.errors import UserError


BOTH = ("village", "market")


@pytest.fixture
def run(
    planted: Callable[[str], Path], prepared: Callable[[tuple[str, ...]], Path], local_data: Path, tmp_path: Path
) -> Callable[..., dict[str, Any]]:
    def go(name: str, *options: str, kinds: tuple[str, ...] = BOTH, baseline: str = "sound") -> dict[str, Any]:
        words = [planted(name), "--baseline", planted(baseline), "--dataset_dir", prepared(kinds)]
        words += ["--local_data", local_data, "--tokens", "10000", "--output_dir", tmp_path / name, "--device", "cpu"]
        diagnose.main([*map(str, words), *options])
        return json.loads((tmp_path / name / "diagnosis.json").read_text())

    return go


@pytest.mark.parametrize(
    ("name", "kinds", "cause", "shown"),
    [
        ("untrained_positions", BOTH, "untrained positions", "from position 32 on"),
        (
            "no_separator",
            BOTH,
            "a separator that was not learned",
            "where documents end, its loss on the separator is",
        ),
        ("market_alone", ("market",), "the text that it was trained on", "validation village by"),
        ("torn_documents", BOTH, "context that is not used", "the text before the last sentence is worth"),
    ],
)
def test_a_planted_defect_is_named_and_nothing_else(
    run: Callable[..., dict[str, Any]], name: str, kinds: tuple[str, ...], cause: str, shown: str
) -> None:
    found = run(name, kinds=kinds)
    assert [its["name"] for its in found["causes"]] == [cause]
    assert shown in found["causes"][0]["evidence"]
    assert found["conclusion"].startswith(f"Likely cause: {cause}.")


@pytest.mark.parametrize(
    ("name", "said"), [("other_seed", "The two models are nearly alike"), ("brief", "of one size everywhere")]
)
def test_a_sound_model_has_no_cause(run: Callable[..., dict[str, Any]], name: str, said: str) -> None:
    found = run(name)
    assert found["causes"] == found["not_judged"] == []
    assert found["conclusion"].startswith(
        f"No cause stands out. {said}" if name == "other_seed" else "No cause stands out."
    )
    assert said in found["conclusion"]


@pytest.mark.parametrize("baseline", ["no_separator", "untrained_positions", "market_alone"])
def test_a_defect_of_the_baseline_is_no_cause(run: Callable[..., dict[str, Any]], baseline: str) -> None:
    found = run("sound", baseline=baseline)
    assert found["causes"] == []
    assert "The model is nowhere worse than the baseline" in found["conclusion"]


def test_a_model_that_learned_nothing_has_no_defect_of_positions_or_separator(
    run: Callable[..., dict[str, Any]],
) -> None:
    found = run("random")
    assert {its["name"] for its in found["causes"]} <= {"context that is not used"}
    assert "The difference" in found["conclusion"]  # it is large, and said


def test_files_and_figures_hold_the_same_numbers(
    run: Callable[..., dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = run("brief")
    folder = tmp_path / "brief"
    table = (folder / "diagnosis.md").read_text()
    assert table in capsys.readouterr().out
    assert {path.name for path in folder.glob("*.png")} == {
        "positions.png",
        "frequencies.png",
        "domains.png",
        "document_start.png",
    }
    assert [bucket["label"] for bucket in found["domains"]] == [
        "validation text",
        "validation village",
        "LAMBADA passages",
        "wikitext",
    ]
    for bucket in (*found["domains"], *found["positions"], *found["frequencies"]):
        assert bucket["ours"] - bucket["theirs"] == pytest.approx(bucket["difference"]["value"], abs=1e-9)
        assert f"| {bucket['label']} | {bucket['tokens']:,} | {bucket['ours']:.3f} | {bucket['theirs']:.3f} |" in table
    assert sum(bucket["tokens"] for bucket in found["frequencies"]) == sum(
        bucket["tokens"] for bucket in found["domains"]
    )
    assert found["window"] == 64


def test_mistakes_are_one_line(
    planted: Callable[[str], Path],
    local_data: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
) -> None:
    sound = str(planted("sound"))
    stranger = str(tmp_path / "stranger")
    model.save_pretrained(stranger)
    tokenizer.save_pretrained(stranger)
    torn = tmp_path / "torn"
    torn.mkdir()
    (torn / "wikitext.jsonl").write_text('{"page": "a"}\n{"pa')
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "lambada_openai.jsonl").write_text("")
    (tmp_path / "file").write_text("")
    for words, said in [
        ([sound, "--baseline", stranger, "--local_data", str(local_data)], "have different tokenizers"),
        ([sound, "--baseline", sound], "there is no text to diagnose on"),
        ([sound, "--baseline", sound, "--local_data", str(torn)], "line 2"),
        ([sound, "--baseline", sound, "--local_data", str(empty)], "holds no document"),
        ([sound, "--baseline", sound, "--output_dir", str(tmp_path / "file")], "is a file: name a folder"),
        ([sound, "--baseline", sound, "--local_data", str(tmp_path / "none")], "is no folder"),
        ([sound, "--baseline", sound, "--dataset_dir", str(tmp_path / "none")], "prepare the data first"),
        ([sound, "--baseline", str(tmp_path / "none")], "there is no checkpoint"),
        ([sound, "--tokens", "0"], "--tokens must be at least 1"),
        ([sound, "--tokens", "many"], "--tokens"),
        ([sound, "--tokens", "nan"], "--tokens"),
        ([sound, "--tokens", "inf"], "--tokens"),
        ([sound, "--max_length", "2"], "--max_length at least 16"),
        ([sound, "--token", "3"], "did you mean '--tokens'"),
    ]:
        with pytest.raises(UserError, match=said):
            diagnose.main(words)

"""Whatever lies in a run folder: a page or one line, never a traceback."""

import json
from pathlib import Path
from typing import Any

import pytest

from gpt2_repro.errors import UserError
from gpt2_repro.report.__main__ import main


HUGE = "1" + "0" * 400
EVENTS = [
    '[1]\n5\n"x"\nnull\n',
    '{"step": 1, "loss": 1e308, "tokens": 1e308}\n',
    f'{{"step": 1, "loss": {HUGE}, "tokens": {HUGE}}}\n',
    '{"step": 1, "tokens": 8, "eval_loss": 3, "hellaswag_acc": 0.3}\n',
    '{"step": 1, "tokens": 8, "eval_loss": 3, "hellaswag_acc": 1e300, "hellaswag_items": null}\n',
    '{"step": 0, "tokens": 0, "eval_loss": 3}\n',
    '{"step": "1", "loss": "x", "tokens": []}\n',
    "[" * 100_000 + "\n",
]
SAMPLES = [
    '{"text": "no step"}\n',
    '{"step": 1, "prompt": ["a"], "text": null}\n',
    '{"step": 1, "prompt": null, "text": "b"}\n',
]
STATUS = [
    {"seconds": float("nan"), "accounts": None},
    {"seconds": float("inf"), "accounts": {"training": "x", "saving": float("nan")}},
    {"updated": "yesterday", "state": "running"},
    {"step": "x", "tokens": {}, "max_steps": "many", "state": 5},
    {"state": "diverged", "reason": "five updates in a row"},
]
ENVIRONMENT = [
    {"parameters": "many", "plan": None, "usd_per_hour": "14", "deviations": None},
    {"deviations": [None, 5], "data": [], "accelerator": 5, "reference": "llm.c"},
]


def report(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Page and health check both end in output or in a UserError of one line."""
    for words in ([str(run)], [str(run), "--check"]):
        try:
            main(words)
        except UserError as error:
            assert "\n" not in str(error)
        except SystemExit as end:
            assert end.code in (False, True)
        else:
            assert capsys.readouterr().out


@pytest.mark.parametrize("lines", EVENTS)
def test_events_of_all_kinds(lines: str, run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run_folder / "metrics.jsonl").open("a").write(lines)
    report(run_folder, capsys)
    (run_folder / "metrics.jsonl").write_text(lines)
    report(run_folder, capsys)


@pytest.mark.parametrize("lines", SAMPLES)
def test_samples_of_all_kinds(lines: str, run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run_folder / "samples.jsonl").write_text(lines)
    report(run_folder, capsys)


@pytest.mark.parametrize(
    ("name", "values"),
    [*(("run_status.json", its) for its in STATUS), *(("environment.json", its) for its in ENVIRONMENT)],
)
def test_values_of_all_kinds(
    name: str, values: dict[str, Any], run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run_folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    report(run_folder, capsys)


@pytest.mark.parametrize("name", ["recipe.yaml", "environment.json", "run_status.json"])
def test_what_is_no_text_is_named(name: str, run_folder: Path) -> None:
    (run_folder / name).write_bytes(b"\xff\xfe{")
    with pytest.raises(UserError, match=name):
        main([str(run_folder)])


@pytest.mark.parametrize("key", ["baseline", "limit", "models", "rows"])
def test_a_comparison_of_another_version_is_named(key: str, run_folder: Path) -> None:
    path = run_folder / "evaluation" / "comparison.json"
    comparison = json.loads(path.read_text())
    del comparison[key]
    path.write_text(json.dumps(comparison))
    with pytest.raises(UserError, match="comparison.json is none of this version: type bash evaluate.sh again"):
        main([str(run_folder)])


@pytest.mark.parametrize(
    "diagnosis", [{"models": None}, {"models": [{"name": "a"}], "conclusion": "b", "domains": [{"label": "c"}]}]
)
def test_a_diagnosis_of_another_version_is_named(diagnosis: dict[str, Any], run_folder: Path) -> None:
    path = run_folder / "evaluation" / "diagnosis" / "diagnosis.json"
    path.parent.mkdir()
    path.write_text(json.dumps(diagnosis))
    with pytest.raises(UserError, match=r"diagnosis.json is none of this version: type python -m gpt2_repro.diagnose"):
        main([str(run_folder)])


def test_figures_lie_beside_the_page_wherever_it_is(run_folder: Path, tmp_path: Path) -> None:
    (run_folder / "report").write_text("a file")  # as unwritable as a copy that is only to be read
    main([str(run_folder), "-o", str(tmp_path / "page.html")])
    assert sorted(path.name for path in (tmp_path / "page").iterdir()) == [
        *("learning_rate.png", "loss.png", "throughput.png")
    ]

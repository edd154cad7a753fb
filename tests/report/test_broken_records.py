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
def test_a_file_that_is_not_text_is_named(name: str, run_folder: Path) -> None:
    (run_folder / name).write_bytes(b"\xff\xfe{")
    with pytest.raises(UserError, match=name):
        main([str(run_folder)])


COMPARISONS = [{"baseline": "gpt2"}, {"models": None, "rows": []}, {"models": [{"name": "a"}], "rows": [5]}]
DIAGNOSES = [{"models": None}, {"models": [{"name": "a"}], "domains": [{"label": "c"}]}]


@pytest.mark.parametrize(
    ("name", "command", "content"),
    [
        *(("comparison.json", "bash evaluate.sh", json.dumps(its)) for its in COMPARISONS),
        *(("diagnosis/diagnosis.json", "python -m gpt2_repro.diagnose", json.dumps(its)) for its in DIAGNOSES),
        ("comparison.json", "bash evaluate.sh", "{"),
        ("diagnosis/diagnosis.json", "python -m gpt2_repro.diagnose", "["),
    ],
)
def test_a_damaged_document_is_named_with_its_command(name: str, command: str, content: str, run_folder: Path) -> None:
    path = run_folder / "evaluation" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(content)
    with pytest.raises(UserError) as refused:
        main([str(run_folder)])
    assert str(path) in str(refused.value) and command in str(refused.value) and "\n" not in str(refused.value)


def test_figures_lie_beside_the_page_wherever_it_is(run_folder: Path, tmp_path: Path) -> None:
    (run_folder / "report").write_text("a file")  # as unwritable as a copy that is only to be read
    main([str(run_folder), "-o", str(tmp_path / "page.html")])
    assert sorted(path.name for path in (tmp_path / "page").iterdir()) == [
        *("learning_rate.png", "loss.png", "throughput.png")
    ]

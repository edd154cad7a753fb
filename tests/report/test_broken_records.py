"""`gpt2_repro.report` reads unusual or damaged files of a run without a traceback.

For unusual values, the command prints a report or a one-line error. For a damaged file, the command prints a one-line
error that names the file.
"""

from pathlib import Path
from typing import Any

import pytest

from gpt2_repro.errors import UserError
from gpt2_repro.report.__main__ import main
from tests.report.conftest import change


HUGE = "1" + "0" * 400
ODD: list[tuple[str, str | dict[str, Any]]] = [
    ("metrics.jsonl", '[1]\n5\n"x"\nnull\n{"step": "1", "loss": "x", "tokens": []}\n' + "[" * 100_000 + "\n"),
    ("metrics.jsonl", '{"step": 1, "tokens": 8, "loss": 8, "learning_rate": 1, "grad_norm": 0}\n'),
    ("metrics.jsonl", '{"step": 1, "tokens": 8, "loss": 8, "tokens_per_second": 9}\n'),
    ("metrics.jsonl", '{"step": 1, "loss": 1e308, "tokens": 1e308}\n'),
    ("metrics.jsonl", f'{{"step": 1, "loss": {HUGE}, "tokens": {HUGE}}}\n'),
    ("metrics.jsonl", '{"step": 1, "tokens": 8, "eval_loss": 3, "hellaswag_acc": 0.3, "hellaswag_items": null}\n'),
    ("metrics.jsonl", '{"step": 0, "tokens": 0, "eval_loss": 3, "hellaswag_acc": 1e300}\n'),
    ("samples.jsonl", '{"text": "no step"}\n{"step": 1, "prompt": ["a"], "text": null}\n{"step": 1, "text": "b"}\n'),
    (
        "run_status.json",
        {"seconds": float("nan"), "time_breakdown": None, "state": "diverged", "reason": "five updates"},
    ),
    ("run_status.json", {"seconds": float("inf"), "time_breakdown": {"training": "x", "saving": float("nan")}}),
    ("run_status.json", {"updated": "yesterday", "state": "running"}),
    ("run_status.json", {"step": "x", "tokens": {}, "max_steps": "many", "state": 5}),
    ("environment.json", {"parameters": "many", "plan": None, "usd_per_hour": "14", "deviations": None}),
    ("environment.json", {"deviations": [None, 5], "data": [], "accelerator": 5, "reference": "llm.c"}),
]


@pytest.mark.parametrize(("name", "content"), ODD)
def test_odd_values(name: str, content: Any, run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if isinstance(content, str):
        (run_folder / name).write_text(content, encoding="utf-8")
    else:
        change(run_folder / name, **content)
    for words in ([str(run_folder)], [str(run_folder), "--check"]):
        try:
            main(words)
        except UserError as error:
            assert "\n" not in str(error)
        except SystemExit as end:
            assert end.code in (False, True)
        else:
            assert capsys.readouterr().out


COMPARISON, DIAGNOSIS = "evaluation/comparison.json", "evaluation/diagnosis/diagnosis.json"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *((name, b"\xff\xfe{") for name in ("recipe.yaml", "environment.json", "run_status.json", COMPARISON)),
        (COMPARISON, b'{"baseline": "gpt2"}'),
        (COMPARISON, b'{"models": null, "rows": []}'),
        (COMPARISON, b'{"models": [{"name": "a"}], "rows": [5]}'),
        (DIAGNOSIS, b'{"models": null}'),
        (DIAGNOSIS, b'{"models": [{"name": "a"}], "domains": [{"label": "c"}]}'),
    ],
)
def test_a_damaged_file_is_named(name: str, content: bytes, run_folder: Path) -> None:
    (run_folder / "metrics.jsonl").unlink()  # without metrics no figures are drawn, which saves time
    path = run_folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    with pytest.raises(UserError) as refused:
        main([str(run_folder)])
    assert str(path) in str(refused.value) and "\n" not in str(refused.value)

"""`python -m gpt2_repro.report RUN --check`: healthy or not, from the run's files."""

import datetime
import json
from pathlib import Path

import pytest

from gpt2_repro.report.__main__ import main
from gpt2_repro.report.check import signs
from gpt2_repro.report.plots import run_figures
from gpt2_repro.report.read import read_run


NOW = datetime.datetime(2026, 1, 2, 3, 10, tzinfo=datetime.UTC)


def change(folder: Path, name: str, **values: object) -> None:
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def add(folder: Path, **event: object) -> None:
    with (folder / "metrics.jsonl").open("a") as lines:
        lines.write(json.dumps(event) + "\n")


def marks(folder: Path, now: datetime.datetime = NOW) -> dict[str, str]:
    return {sign.words: sign.mark for sign in signs(read_run(folder), now)}


def test_a_finished_run_is_healthy(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(run_folder.rglob("*"))
    with pytest.raises(SystemExit) as ended:
        main([str(run_folder), "--check"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.splitlines() == [
        "✓ demo: complete, step 40 of 40, 327,680 tokens",
        "✓ 9,030 tokens/s",
    ]
    assert sorted(run_folder.rglob("*")) == before  # nothing is written


@pytest.mark.parametrize(
    ("status", "mark", "words"),
    [
        ({"state": "running", "step": 20, "tokens": 163_840}, "✓", "left at its speed"),
        ({"state": "running", "updated": "2026-01-02T01:00:00+00:00"}, "✗", "hangs or was killed"),
        ({"state": "diverged", "reason": "the norm is not finite"}, "✗", "the norm is not finite"),
        ({"state": "failed", "reason": None}, "✗", "no reason is written down"),
        ({"state": "stopped", "reason": "SIGTERM"}, "!", "stopped"),
    ],
)
def test_each_sign(run_folder: Path, status: dict, mark: str, words: str) -> None:
    change(run_folder, "run_status.json", **status)
    assert [its for said, its in marks(run_folder).items() if words in said] == [mark]


def test_losses_and_waiting(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    add(run_folder, step=41, loss=float("nan"), updates_skipped=2, tokens_per_second=5.0, data_wait=0.4)
    found = marks(run_folder)
    assert found["the loss was not finite at 1 steps, the last one 41"] == "✗"
    assert found["2 updates were skipped"] == "!"
    assert [mark for words, mark in found.items() if "40% of the time waiting for rows" in words] == ["!"]
    with pytest.raises(SystemExit) as ended:
        main([str(run_folder), "--check"])
    assert ended.value.code == 1 and "✗" in capsys.readouterr().out


@pytest.mark.parametrize(
    "events",
    [
        [{"step": step, "eval_loss": step / 10} for step in range(41, 45)],
        [{"step": step, "loss": 50.0} for step in range(41, 60)],
    ],
    ids=["validation", "training"],
)
def test_losses_that_get_worse(run_folder: Path, events: list[dict]) -> None:
    for event in events:
        add(run_folder, **event)
    with pytest.raises(SystemExit) as ended:
        main([str(run_folder), "--check"])
    assert ended.value.code == 1


@pytest.mark.parametrize(("loss", "mark"), [(4.331, "✓"), (4.5, "✗")])
def test_a_run_that_follows_a_reference_is_judged_by_it(run_folder: Path, loss: float, mark: str) -> None:
    add(run_folder, step=1000, tokens=524_288_000, eval_loss=loss)
    assert not any("llm.c" in words for words in marks(run_folder))
    assert "reference" not in run_figures(read_run(run_folder))
    change(run_folder, "environment.json", reference="llm.c")
    assert [its for words, its in marks(run_folder).items() if "llm.c 4.315–4.345" in words] == [mark]
    assert "reference" in run_figures(read_run(run_folder))

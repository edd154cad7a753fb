"""`python -m gpt2_repro.report RUN --check` recognizes healthy and unhealthy runs."""

import datetime
import math
from pathlib import Path

import pytest

from gpt2_repro.report.__main__ import main
from gpt2_repro.report.check import risen_training_loss, rising_validation, signs
from gpt2_repro.report.plots import run_figures
from gpt2_repro.report.read import read_run
from tests.report.conftest import add, change


NOW = datetime.datetime(2026, 1, 2, 3, 10, tzinfo=datetime.UTC)
AGO = "2026-01-02T01:00:00+00:00"


def marks(folder: Path) -> dict[str, str]:
    return {sign.words: sign.mark for sign in signs(read_run(folder), NOW)}


@pytest.mark.parametrize(
    ("events", "code"),
    [
        ([], 0),
        ([{"step": step, "eval_loss": step / 10} for step in range(41, 45)], 1),
        ([{"step": step, "loss": 50.0} for step in range(41, 60)], 1),
        ([{"step": 41, "loss": math.nan}], 1),
        ([{"step": 41, "loss": None}], 1),
        ([{"step": 41 + place, "eval_loss": loss} for place, loss in enumerate((5.0, 5.1, None, 5.3, 5.4))], 0),
    ],
)
def test_the_exit_code(run_folder: Path, events: list[dict], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    for event in events:
        add(run_folder, **event)
    before = sorted(run_folder.rglob("*"))
    with pytest.raises(SystemExit) as ended:
        main([str(run_folder), "--check"])
    out = capsys.readouterr().out
    assert ended.value.code == code and ("✗" in out) == code and "step 40 of 40" in out and "tokens/s" in out
    assert sorted(run_folder.rglob("*")) == before  # no file was written


@pytest.mark.parametrize(
    ("status", "mark", "words"),
    [
        ({"state": "running", "step": 20, "tokens": 163_840}, "✓", "18 s left"),
        ({"state": "running", "updated": AGO}, "✗", "2 h 10 min ago"),
        ({"state": "diverged", "reason": "the norm is not finite"}, "✗", "the norm is not finite"),
        ({"state": "failed", "reason": None}, "✗", "failed"),
        ({"state": "stopped", "reason": "SIGTERM"}, "!", "stopped"),
    ],
)
def test_each_state(run_folder: Path, status: dict, mark: str, words: str) -> None:
    change(run_folder / "run_status.json", **status)
    assert [its for said, its in marks(run_folder).items() if words in said] == [mark]


def test_missing_files_are_named(run_folder: Path) -> None:
    assert marks(run_folder)["final/ is missing or not complete"] == "!"
    lines = (run_folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    (run_folder / "metrics.jsonl").write_text(
        "\n".join([*lines[: len(lines) // 2], "{", lines[0]]) + "\n", encoding="utf-8"
    )
    found = marks(run_folder)
    assert [mark for words, mark in found.items() if "metrics.jsonl" in words] == ["✗", "✗"]


def test_skipped_updates_and_waiting_are_named(run_folder: Path) -> None:
    add(run_folder, step=41, loss=4.0, updates_skipped=2, tokens_per_second=5.0, data_wait=0.4)
    found = marks(run_folder)
    assert {words[-1]: mark for words, mark in found.items() if "skipped" in words} == {"2": "!"}
    assert [mark for words, mark in found.items() if "40%" in words] == ["!"]


@pytest.mark.parametrize(("loss", "mark"), [(4.331, "✓"), (4.5, "✗")])
def test_a_run_that_follows_a_reference_is_judged_by_it(run_folder: Path, loss: float, mark: str) -> None:
    (run_folder / "metrics.jsonl").unlink()
    add(run_folder, step=1000, tokens=524_288_000, eval_loss=loss)
    assert not any("llm.c" in words for words in marks(run_folder))
    change(run_folder / "environment.json", reference="llm.c")
    assert [its for words, its in marks(run_folder).items() if "llm.c 4.315–4.345" in words] == [mark]
    assert set(run_figures(read_run(run_folder))) == {"loss", "reference"}


def test_three_rises_in_a_row() -> None:
    assert rising_validation((3.0, 3.1, 3.2, 3.3)) and rising_validation((4.0, 3.9, 3.0, 3.1, 3.2, 3.3))
    for losses in ((3.0, 3.1, 3.2), (3.0, 3.1, 3.2, 3.2), (3.0, 3.1, 3.2, 3.3, 3.2), (3.0, 3.1, math.nan, 3.3, 3.4)):
        assert rising_validation(losses) is None


def test_training_loss_far_above_its_best() -> None:
    rows = [{"step": step, "loss": 8 - step / 100 + (step % 3 - 1) * 0.9} for step in range(1, 401)]
    assert risen_training_loss([]) is None
    assert risen_training_loss(rows) is None  # noise
    rows.append({"step": 402, "loss": 20.0})
    assert risen_training_loss(rows) is None  # one spike
    rows += [{"step": step, "loss": 6.0} for step in range(403, 600)]
    assert risen_training_loss(rows) is not None
    rows += [{"step": step, "loss": 4.0} for step in range(600, 1200)]
    assert risen_training_loss(rows) is None


@pytest.mark.parametrize("interval", [1, 10])
def test_sparse_logs_are_smoothed_over_the_same_steps(interval: int) -> None:
    """The smoothed loss does not depend on the number of steps between logged losses."""
    # The time constant is 100 steps: 100 * ln 2 = 69.3 steps after the jump at step 100, the smoothed loss is 0.5
    # (the limit) above its lowest value.
    rows = [{"step": step, "loss": 5.0 if step <= 100 else 6.0} for step in range(interval, 171, interval)]
    assert risen_training_loss(rows) is not None
    assert risen_training_loss([row for row in rows if row["step"] <= 160]) is None

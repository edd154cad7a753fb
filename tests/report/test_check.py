"""`python -m gpt2_repro.report RUN --check` recognizes healthy and unhealthy runs."""

from pathlib import Path

import pytest

from gpt2_repro.report.__main__ import main
from gpt2_repro.run_record import RunRecord
from tests.report.conftest import add, change


AGO = "2026-01-02T01:00:00+00:00"


@pytest.fixture
def check(run_folder: Path, capsys: pytest.CaptureFixture[str]):
    """Return a function that runs --check; it returns the exit code and the output."""

    def run() -> tuple[int, str]:
        before = sorted(run_folder.rglob("*"))
        with pytest.raises(SystemExit) as ended:
            main([str(run_folder), "--check"])
        assert sorted(run_folder.rglob("*")) == before  # no file was written
        out = capsys.readouterr().out
        assert ended.value.code == ("✗" in out)
        return int(ended.value.code or 0), out

    return run


@pytest.mark.parametrize(
    ("events", "code"),
    [
        ([], 0),
        ([{"step": step, "eval_loss": step / 10} for step in range(41, 45)], 1),
        ([{"step": step, "loss": 50.0} for step in range(41, 60)], 1),
        ([{"step": 41, "loss": 20.0}], 0),  # one spike
        ([{"step": 41, "loss": None}], 1),
        ([{"step": 41, "loss": 4.0, "updates_skipped": 2, "tokens_per_second": 5.0, "data_wait": 0.4}], 0),
    ],
)
def test_losses(run_folder: Path, events: list[dict], code: int, check) -> None:
    for event in events:
        add(run_folder, **event)
    ended, out = check()
    assert ended == code and "step 40 of 40" in out


def test_each_check_that_passes_has_its_value(run_folder: Path, check) -> None:
    change(run_folder / "environment.json", data={"reference_losses": {"unigram": 9.0, "bigram": 1.0}})
    add(run_folder, step=39, eval_loss=4.5)
    add(run_folder, step=40, eval_loss=4.25)
    code, out = check()
    assert code == 0
    lines = out.splitlines()
    assert {line[0] for line in lines} == {"✓", "!"}
    for words in ("up to step 40", "4.2500; it was 4.5000 before", "4.75 below the unigram", "no optimizer update"):
        assert sum(words in line for line in lines) == 1, words
    (above,) = [line for line in lines if "3.25 above the bigram" in line]
    assert above.startswith("!")


def test_a_dead_run_shows_the_last_line_that_it_printed(run_folder: Path, check) -> None:
    change(run_folder / "run_status.json", state="failed", reason="RuntimeError")
    assert "console.log" not in check()[1]
    (run_folder / "console.log").write_text("step 40\n\x1b[31mout of memory\n\n", encoding="utf-8")
    state = check()[1].splitlines()[0]
    assert state.endswith("out of memory")
    assert "\x1b" not in state


@pytest.mark.parametrize(
    ("status", "mark", "words"),
    [
        ({"state": "running", "updated": AGO}, "✗", "No sign of life since 2026-01-02"),
        ({"state": "diverged", "reason": "the norm is not finite"}, "✗", "the norm is not finite"),
        ({"state": "stopped", "reason": "SIGTERM"}, "!", "stopped"),
    ],
)
def test_each_state(run_folder: Path, status: dict, mark: str, words: str, check) -> None:
    change(run_folder / "run_status.json", **status)
    line = check()[1].splitlines()[0]
    assert line.startswith(mark) and words in line


def test_a_killed_run_is_unhealthy_at_once(run_folder: Path, check, capsys) -> None:
    record = RunRecord(run_folder)
    record.claim(record.recipe_text())
    change(run_folder / "run_status.json", step=20)
    assert check()[0] == 0
    record.unlock()
    code, out = check()
    assert code == 1 and out.startswith("✗")
    main([str(run_folder), "-o", str(run_folder.parent / "page.html")])
    printed = capsys.readouterr().out
    assert "killed" in printed and " left" not in printed
    (run_folder / ".lock").write_text("process 7 on another-machine", encoding="utf-8")
    assert check()[0] == 0, "the process may run on that machine"
    change(run_folder / "run_status.json", updated=AGO)
    assert check()[0] == 1


@pytest.mark.parametrize(("loss", "mark"), [(4.331, "✓"), (4.5, "✗")])
def test_a_run_that_follows_a_reference_is_judged_by_it(run_folder: Path, loss: float, mark: str, check) -> None:
    (run_folder / "metrics.jsonl").unlink()
    add(run_folder, step=1000, tokens=524_288_000, eval_loss=loss)
    assert "llm.c" not in check()[1]
    change(run_folder / "environment.json", reference="llm.c")
    (line,) = [line for line in check()[1].splitlines() if "llm.c 4.315–4.345" in line]
    assert line.startswith(mark)

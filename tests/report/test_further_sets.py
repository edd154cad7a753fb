"""Validation sets beside the main one stand in the curve, the tiles, the table and the summary."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from gpt2_repro.report.facts import facts
from gpt2_repro.report.page import write_page
from gpt2_repro.report.plots import run_figures
from gpt2_repro.report.read import read_run
from gpt2_repro.report.summary import summary
from gpt2_repro.report.tables import validation_table


@pytest.fixture
def with_sets(run_folder: Path) -> Path:
    """The finished run, with two further sets in each of its validations and padded rows."""
    lines = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        if "eval_loss" in line:
            line |= {"eval_wikitext_loss": line["eval_loss"] + 1, "eval_wikitext_tokens": 287}
            line |= {"eval_my_prose_loss": line["eval_loss"] - 1, "eval_my_prose_tokens": 99}
        else:
            line |= {"step_tokens": 8190, "padding": 0.0625}
    (run_folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run_folder


def test_their_last_losses_are_facts(with_sets: Path, tmp_path: Path, make_run: Callable[..., Path]) -> None:
    numbers = facts(read_run(with_sets))
    assert numbers.further_losses == pytest.approx({"wikitext": 5.123, "my_prose": 3.123})
    assert numbers.validation_loss == 4.123 and numbers.padding == 0.0625
    without = facts(read_run(make_run(tmp_path / "plain")))
    assert without.further_losses == {} and without.padding is None


def test_they_stand_on_the_page_and_in_the_summary(with_sets: Path) -> None:
    run = read_run(with_sets)
    table = validation_table(run)
    assert table.headers[:2] == ["step", "tokens"]
    assert {"eval_wikitext_loss (nats/token)", "eval_my_prose_loss (nats/token)"} < set(table.headers)
    column = table.headers.index("eval_wikitext_loss (nats/token)")
    assert [row[column].text[:4] for row in table.rows] == ["5.60", "5.12"]
    write_page([run], with_sets / "report.html")
    page = (with_sets / "report.html").read_text()
    for words in ("Validation, wikitext", "5.123", "Validation, my_prose", "3.123", "further validation sets", "6.2%"):
        assert words in page, words
    lines = "\n".join(summary(run, with_sets / "report.html"))
    assert "validation loss of wikitext 5.123" in lines and "validation loss of my_prose 3.123" in lines


def test_each_is_drawn(with_sets: Path, tmp_path: Path, make_run: Callable[..., Path]) -> None:
    drawn = run_figures(read_run(with_sets))["loss"]
    plain = run_figures(read_run(make_run(tmp_path / "plain")))["loss"]
    assert drawn != plain

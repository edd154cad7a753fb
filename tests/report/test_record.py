"""What else a run has on record: HellaSwag, the bill, deviations, samples through time, the diagnosis, baselines."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from gpt2_repro.baselines import BASELINES, GPT2, baseline_of, published_loss
from gpt2_repro.report.facts import baseline_losses, facts, hellaswag_lines
from gpt2_repro.report.page import write_page
from gpt2_repro.report.plots import leave_out_beginning, run_figures
from gpt2_repro.report.read import read_run
from gpt2_repro.report.summary import summary


DIFFERENCE = {"value": -0.3, "stderr": 0.01}
BUCKET = {
    "label": "validation text",
    "tokens": 9,
    "documents": 2,
    "ours": 4.0,
    "theirs": 4.3,
    "difference": DIFFERENCE,
}
DIAGNOSIS = {
    "models": [{"name": "final"}, {"name": "openai-community/gpt2"}],
    "frequencies_of": "the training text",
    "domains": [BUCKET, BUCKET | {"label": "wikitext", "ours": 5.0}],
    "positions": [],
    "frequencies": [],
    "conclusion": "Likely cause: the text that it was trained on.",
}
FINEWEB = {"source": "fineweb-10bt", "split": "head", "packing": "concat", "tokenizer": "openai-community/gpt2"}


def add(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.fixture
def recorded(run_folder: Path) -> Path:
    """The finished run with everything that a run can have."""
    with (run_folder / "metrics.jsonl").open("a") as file:
        for step, accuracy in ((20, 0.27), (40, 0.3012)):
            event = {"step": step, "tokens": step * 8192, "hellaswag_acc": accuracy, "hellaswag_items": 10_042}
            file.write(json.dumps(event | {"eval_tokens": 10_485_760}) + "\n")
    deviation = {"field": "model.dropout", "run": "0.1", "recipe": "0"}
    add(run_folder / "environment.json", usd_per_hour=14.0, deviations=[deviation])
    add(run_folder / "run_status.json", seconds=3600, accounts={"startup": 60, "training": 3300, "saving": 240})
    return run_folder


def test_hellaswag_stands_beside_gpt2_and_gpt3(recorded: Path) -> None:
    run = read_run(recorded)
    assert [row["hellaswag_acc"] for row in run.hellaswag] == [0.27, 0.3012]
    assert hellaswag_lines(run) == {"GPT-2": 0.294463, "GPT-3": 0.337}
    assert "hellaswag" in run_figures(run)
    assert "  HellaSwag 0.3012 of 10,042 items; GPT-2 0.2945, GPT-3 0.3370" in summary(run, recorded / "report.html")
    lines = (recorded / "metrics.jsonl").read_text().replace("10042", "100")
    (recorded / "metrics.jsonl").write_text(lines)
    assert hellaswag_lines(read_run(recorded)) == {}  # of other items, another score


def test_the_page_has_the_bill_and_the_deviations(recorded: Path) -> None:
    write_page([read_run(recorded)], recorded / "report.html")
    page = (recorded / "report.html").read_text()
    for words in (
        *("Where the minutes went, at $14.00 an hour", "55 min", "91.7%", "$12.83", "$14.00"),
        *("0.3012", "GPT-2 0.2945, GPT-3 0.3370", "1 deviations from recipes/gpt2_124m.yaml", "model.dropout"),
    ):
        assert words in page, words
    assert facts(read_run(recorded)).usd == 14.0
    assert "  training                    55 min   91.7%    $12.83" in summary(read_run(recorded), recorded)


def test_a_diagnosis_stands_on_the_page_and_measures_the_baseline(recorded: Path) -> None:
    assert baseline_losses(read_run(recorded)) == {}  # nothing is published of this data
    folder = recorded / "evaluation" / "diagnosis"
    folder.mkdir()
    (folder / "diagnosis.json").write_text(json.dumps(DIAGNOSIS))
    run = read_run(recorded)
    assert baseline_losses(run) == {"baseline": pytest.approx(4.123 + 0.3)}
    write_page([run], recorded / "report.html")
    page = (recorded / "report.html").read_text()
    assert "Likely cause: the text that it was trained on." in page and "Loss by domain" in page
    assert "Dashed, baseline: openai-community/gpt2, by the difference that the diagnosis measured." in page
    assert "<td>wikitext</td>" in page and "Loss by position" not in page


def test_what_is_published_is_drawn_on_its_own_data_only(recorded: Path) -> None:
    data = json.loads((recorded / "environment.json").read_text())["data"]
    add(recorded / "environment.json", data=data | {"request": FINEWEB}, parameters=124_439_808)
    assert baseline_losses(read_run(recorded)) == {"GPT-2": 3.424958}
    assert (
        published_loss(GPT2, FINEWEB | {"source": "fineweb-edu-10bt-tokens", "split": "source"}, 10_485_760) == 3.2924
    )
    for change in ({"source": "openwebtext"}, {"split": "hash"}, {"packing": "wrap"}, {"tokenizer": "train:300"}):
        assert published_loss(GPT2, FINEWEB | change, 10_485_760) is None
    assert published_loss(GPT2, FINEWEB, 10_000_000) is None


@pytest.mark.parametrize(
    ("parameters", "name"), [(None, "GPT-2"), (1e6, "GPT-2"), (1.3e8, "GPT-2"), (8e8, "GPT-2 large")]
)
def test_the_baseline_is_that_of_the_size(parameters: float | None, name: str) -> None:
    assert baseline_of(parameters).name == name
    scores = [its.hellaswag for its in BASELINES]
    assert scores == sorted(scores) and all(its.gpt3_hellaswag > its.hellaswag for its in BASELINES)


def test_several_runs_with_hellaswag_are_laid_over_each_other(
    recorded: Path, make_run: Callable[..., Path], tmp_path: Path
) -> None:
    other = make_run(tmp_path / "elsewhere" / "other")
    write_page([read_run(recorded), read_run(other)], tmp_path / "both.html")
    page = (tmp_path / "both.html").read_text()
    assert "HellaSwag of all runs" in page and "$14.00" in page
    write_page([read_run(other), read_run(other)], tmp_path / "plain.html")
    assert "HellaSwag of all runs" not in (tmp_path / "plain.html").read_text()


def test_a_steep_beginning_lies_above_the_frame_and_a_gentle_one_in_it() -> None:
    tokens = [float(n) for n in range(101)]
    for losses, cut in (([11 / (1 + n) + 3 for n in range(101)], True), ([4 - n / 100 for n in range(101)], False)):
        axes = Figure().subplots()
        axes.plot(tokens, losses)
        leave_out_beginning(axes, [(tokens, losses), ([], [])])
        bottom, top = axes.get_ylim()
        assert bool(top < max(losses)) == cut and bottom < min(losses) and top > losses[5]


def test_a_short_run_beside_a_long_one_stays_in_the_frame() -> None:
    long = [float(n) for n in range(101)], [11 / (1 + n) + 3 for n in range(101)]
    short = [0.0, 1.0, 2.0], [14.0, 9.0, 7.0]
    axes = Figure().subplots()
    for curve in (long, short):
        axes.plot(*curve)
    leave_out_beginning(axes, [long, short])
    assert axes.get_ylim()[1] > 9

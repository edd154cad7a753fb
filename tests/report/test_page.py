"""The report command writes a correct page for complete and incomplete runs."""

import base64
import html
import io
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import matplotlib.image
import pytest
from matplotlib.figure import Figure

from gpt2_repro.errors import UserError
from gpt2_repro.report import plots
from gpt2_repro.report.__main__ import main
from gpt2_repro.report.page import label_runs
from gpt2_repro.report.read import read_run
from gpt2_repro.report.tables import key_numbers, recipe_differences, run_table, sample_text, why_not_comparable
from tests.report.conftest import SAMPLE, add, change, write_run


ROOT = Path(__file__).parents[2]
DIFFERENCE = {"difference": {"value": -0.3, "stderr": 0.01}}
BUCKET = {"label": "validation text", "tokens": 9, "documents": 2, "ours": 4.0, "theirs": 4.3} | DIFFERENCE
DIAGNOSIS = {
    "models": [{"name": "final"}, {"name": "openai-community/gpt2"}],
    "frequencies_of": "the training text",
    "domains": [BUCKET, BUCKET | {"label": "wikitext", "ours": 5.0}],
    "positions": [],
    "frequencies": [],
    "conclusion": "Likely cause: the text that it was trained on.",
}


class _Page:
    """An HTML page: its source, its text, and all addresses that a browser would load."""

    def __init__(self, path: Path) -> None:
        self.source = path.read_text(encoding="utf-8")
        self.text = html.unescape(re.sub(r"<[^>]*>", "", self.source)).replace("\xa0", " ")
        self.addresses = re.findall(r"""\b(?:src|srcset|href|data)\s*=\s*["']?([^"'\s>]*)""", self.source)


@pytest.fixture
def recorded(run_folder: Path) -> Path:
    """A finished run with two extra validation sets, a diagnosis and an hourly price."""
    scored = {"hellaswag_items": 10_042, "eval_tokens": 10_485_760}
    for step, loss, accuracy in ((20, 4.6, 0.27), (40, 4.123, 0.3012)):
        further = {"eval_wikitext_loss": loss + 1, "eval_my_prose_loss": loss - 1}
        add(run_folder, step=step, eval_loss=loss, hellaswag_acc=accuracy, **scored, **further)
    add(run_folder, step=40, loss=4.1, padding=0.0625)
    deviation = {"field": "model.dropout", "run": "0.1", "recipe": "0"}
    change(run_folder / "environment.json", usd_per_hour=14.0, deviations=[deviation])
    parts = {"startup": 60, "training": 3300, "saving": 240}
    change(run_folder / "run_status.json", seconds=3600, time_breakdown=parts)
    (run_folder / "evaluation" / "diagnosis").mkdir()
    change(run_folder / "evaluation" / "diagnosis" / "diagnosis.json", **DIAGNOSIS)
    return run_folder


def test_the_whole_record_is_on_the_page_and_in_the_summary(recorded: Path, capsys) -> None:
    main([str(recorded)])
    page, out = _Page(recorded / "report.html"), capsys.readouterr().out
    numbers = [
        *("complete", "step 40 of 40", "4.123", "bigram 4.601", "5.123", "3.123"),  # losses of three sets
        *("0.3012", "GPT-2 0.2945, GPT-3 0.3370", "25.0%", "1 h 00 min", "$14.00", "0.2012 ± 0.0055"),
    ]
    for words in numbers:
        assert words in page.text and words in out, words
    for words in ("7.4 M", "9,020", "6.2%", "55 min", "91.7%", "$12.83"):
        assert words in page.text and words not in out, words
    for words in ("2,813,412", "plan.tokens_per_step", "learning_rate: 0.001", "launch train.py", "model.dropout"):
        assert words in page.text, words
    assert "eval_wikitext_loss (nats/token)" in page.text and "5.6000" in page.text  # in the table of all validations
    # The diagnosis measured the baseline's loss on the same tokens: 4.123 + 0.3.
    assert DIAGNOSIS["conclusion"] in page.text and "Dashed, baseline: openai-community/gpt2" in page.text
    assert "Loss by domain" in page.text and "Loss by position" not in page.text
    # The newest sample comes first, and its markup has no effect.
    assert page.text.index(SAMPLE) < page.text.index("Earlier samples") < page.text.index("early words")
    assert "<script" not in page.source and html.escape("<script>alert(", quote=False) in page.source
    # The page loads no other files. The figures are also written as PNG files next to the page.
    assert not re.search(r"@import|url\(", page.source)
    assert all(address.startswith("data:image/png;base64,") for address in page.addresses)
    pictures = [base64.b64decode(address.split(",")[1]) for address in page.addresses]
    files = {path.stem: path.read_bytes() for path in (recorded / "report").iterdir()}
    assert files.keys() == {"hellaswag", "learning_rate", "loss", "throughput"}
    assert sorted(files.values()) == sorted(pictures)
    for png in pictures:
        image = matplotlib.image.imread(io.BytesIO(png), format="png")
        assert image.shape[0] > 500 and image[..., :3].min() < 0.9, "the figure is blank"
    assert out.splitlines()[-1].endswith(str(recorded / "report.html"))


def test_a_run_that_has_only_begun(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(run_folder / "evaluation")
    for path in run_folder.glob("*.json*"):
        path.unlink()
    main([str(run_folder)])
    page, out = _Page(run_folder / "report.html"), capsys.readouterr().out
    missing = read_run(run_folder).missing()
    assert set(missing) == {"training", "validation", "samples", "evaluation", "environment"}
    assert f"bash evaluate.sh {run_folder}" in missing["evaluation"]
    assert all(sentence in page.text and sentence in out for sentence in missing.values())
    assert page.addresses == []


def test_the_learning_rate_lies_inside_its_frame(run_folder: Path) -> None:
    figure = Figure()
    plots._draw_learning_rate(figure, read_run(run_folder))
    assert all(axes.get_xlim()[1] >= 40 * 8192 for axes in figure.axes)


def test_a_caption_describes_what_is_drawn(tmp_path: Path) -> None:
    parts = ("Thin line", "Dots", "above the frame", "unigram", "bigram")
    short, long, validated = (
        write_run(tmp_path / name, steps=steps) for name, steps in (("a", 40), ("b", 400), ("c", 1))
    )
    (validated / "metrics.jsonl").write_text('{"step": 1, "tokens": 8, "eval_loss": 3}\n', encoding="utf-8")
    for folder, missing in (
        (short, ["above the frame"]),
        (long, ["unigram"]),
        (validated, ["Thin line", "above the frame"]),
    ):
        caption = plots.run_figures(read_run(folder))["loss"].caption
        assert [part for part in parts if part not in caption] == missing


def test_a_loss_is_compared_with_the_models_that_count(run_folder: Path) -> None:
    for loss, kinds in ((4.5, ["better", "better"]), (4.7, ["better", "worse"]), (7.0, ["worse", "worse"])):
        change(run_folder / "run_status.json", eval_loss=loss)
        add(run_folder, step=40, tokens=40 * 8192, eval_loss=loss)
        first = key_numbers(read_run(run_folder))[0]
        assert first.text == f"{loss:.3f}" and [note.kind for note in first.notes] == ["", *kinds]


def test_the_step_of_the_last_validation_is_shown(run_folder: Path) -> None:
    add(run_folder, step=41, eval_loss=4.2)
    change(run_folder / "run_status.json", step=45)
    run = read_run(run_folder)
    for number, loss, step in zip(key_numbers(run), ("4.200", "4.123"), ("41", "40"), strict=False):
        assert number.text == loss and step in number.notes[0].text
    assert "at step 41" in [cell.text for cell in run_table([run], ["demo"]).rows[0]]


def test_a_sample_has_no_two_blank_lines_in_a_row() -> None:
    text = "Once\n\n\n \t\n\n    indented\nnext\n\nlast\n\n\n"
    assert sample_text({"prompt": "Once", "text": text}) == "\n\n    indented\nnext\n\nlast"


def test_a_steep_beginning_lies_above_the_frame() -> None:
    steep, flat = [11 / (1 + n) + 3 for n in range(101)], [4 - n / 100 for n in range(101)]
    # Last case: a short run drawn together with a long run.
    for curves, is_cut in (([steep], True), ([flat], False), ([steep, [14.0, 9.0, 7.0]], False)):
        axes = Figure().subplots()
        points = [([float(n) for n in range(len(losses))], losses) for losses in curves]
        for curve in points:
            axes.plot(*curve)
        cut = plots.leave_out_beginning(axes, points)
        bottom, top = axes.get_ylim()
        assert bottom < min(curves[0]) and top > curves[0][5] and (top < curves[0][0]) == is_cut
        assert bool(cut) == is_cut


def test_smoothing_keeps_a_line_and_its_length() -> None:
    line = [float(n) for n in range(500)]
    assert plots.smooth(line) == pytest.approx(line) and plots.smooth([3.0]) == [3.0]
    assert max(plots.smooth([float(n % 2) for n in range(500)])[50:450]) < 0.6


def test_several_runs_are_laid_over_each_other(run_folder: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    other = write_run(tmp_path / "elsewhere" / "demo", learning_rate=2e-3)
    add(other, step=40, tokens=40 * 8192, eval_loss=4.1, hellaswag_acc=0.3, hellaswag_items=100)
    change(other / "environment.json", data={"tokenizer_sha256": "b"}, usd_per_hour=14.0)
    change(run_folder / "environment.json", data={"tokenizer_sha256": "a"})
    monkeypatch.chdir(tmp_path)
    main([str(run_folder), str(other)])
    page, out = _Page(tmp_path / "report.html"), capsys.readouterr().out
    assert len(page.addresses) == 2 + 3 + 4 and not (run_folder / "report.html").exists()
    assert "<h2>runs/demo</h2>" in page.source and "<h2>elsewhere/demo</h2>" in page.source
    assert "HellaSwag of all runs" in page.source and "$0.98" in page.text  # in the table of runs
    assert all("different tokenizers" in text for text in (page.text, out))
    runs = [read_run(run_folder), read_run(other)]
    assert label_runs(runs) == ["runs/demo", "elsewhere/demo"]
    differences = recipe_differences(runs, ["a", "b"])
    assert [[cell.text for cell in row] for row in differences.rows] == [["training.learning_rate", "0.001", "0.002"]]


def test_losses_that_do_not_compare_are_named(run_folder: Path, tmp_path: Path) -> None:
    other, same = write_run(tmp_path / "other"), {"tokenizer_sha256": "a"}
    split, another = {"sha256": {"validation": "a"}}, {"sha256": {"validation": "b"}}
    for ours, theirs, reasons in ((split, another, 1), (same, same, 0), ({}, same, 0)):
        for folder, data in ((run_folder, ours), (other, theirs)):
            change(folder / "environment.json", data=data)
        assert len(why_not_comparable([read_run(run_folder), read_run(other)])) == reasons


def test_the_page_goes_where_it_is_told(run_folder: Path, tmp_path: Path) -> None:
    (run_folder / "report").write_text("a file", encoding="utf-8")  # the folder for the figures cannot be created
    (run_folder / "metrics.jsonl").unlink()
    main([str(run_folder), "-o", str(tmp_path / "new" / "page.html")])
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["page.html"]
    for wrong in (tmp_path, run_folder / "report" / "page.html"):
        with pytest.raises(UserError, match=r"-o .*report\.html"):
            main([str(run_folder), "-o", str(wrong)])


def test_reading_a_run_needs_neither_torch_nor_matplotlib() -> None:
    code = "import sys, gpt2_repro.report.__main__; print({'torch', 'transformers', 'matplotlib'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_a_backend_of_matplotlib_that_is_not_installed_is_not_needed(run_folder: Path) -> None:
    """Jupyter sets MPLBACKEND for all commands that are started in a notebook."""
    words = [sys.executable, "-m", "gpt2_repro.report", run_folder]
    subprocess.run(words, cwd=ROOT, env=os.environ | {"MPLBACKEND": "of_a_notebook"}, check=True)
    assert (run_folder / "report.html").is_file()

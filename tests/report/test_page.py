"""The page: what stands on it, and that it needs nothing beside itself."""

import base64
import html
import io
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import matplotlib.image
import pytest
from matplotlib.figure import Figure

from gpt2_repro.report import plots
from gpt2_repro.report.page import label_runs, write_page
from gpt2_repro.report.plots import smooth
from gpt2_repro.report.read import read_run
from gpt2_repro.report.tables import recipe_differences


class _Page(HTMLParser):
    """The text of a page and every address that a browser would load."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.text = ""
        self.addresses: list[str] = []
        self.tags: list[str] = []
        self.feed(source)

    def handle_data(self, data: str) -> None:
        self.text += data

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attributes if name in ("src", "srcset", "href", "data")]


def _page(*folders: Path) -> tuple[str, _Page]:
    output = folders[0] / "report.html"
    write_page([read_run(folder) for folder in folders], output)
    source = output.read_text()
    return source, _Page(source)


def test_the_key_numbers_stand_on_the_page(run_folder: Path) -> None:
    _, page = _page(run_folder)
    for words in (
        "✓ complete",
        "step 40 of 40",
        "4.123",  # validation loss
        "−0.478",  # against the bigram model
        "interpolated bigram 4.601",
        "7.4 M",
        "4 min 12 s",
        "9,020",  # median tokens per second
        "25.0%",
        "2,813,412",
        "plan.tokens_per_step",
        "learning_rate: 0.001",
        "accelerate launch train.py recipes/demo.yaml",
        "0.2012 ± 0.0055",
    ):
        assert words in page.text, words


def test_the_latest_sample_stands_first_and_its_markup_is_inert(run_folder: Path) -> None:
    sample = json.loads((run_folder / "samples.jsonl").read_text().splitlines()[-1])["text"]
    assert "<script>" in sample
    source, page = _page(run_folder)
    assert sample in page.text
    assert page.text.index(sample) < page.text.index("Samples through time") < page.text.index("early words")
    assert "script" not in page.tags
    assert html.escape("<script>alert(", quote=False) in source


def test_nothing_is_loaded_from_elsewhere(run_folder: Path) -> None:
    source, page = _page(run_folder)
    assert len(page.addresses) == 3
    assert all(address.startswith("data:image/png;base64,") for address in page.addresses)
    assert not re.search(r"@import|url\(", source)


def test_the_figures_are_images(run_folder: Path) -> None:
    _, page = _page(run_folder)
    files = sorted(path.name for path in (run_folder / "report").iterdir())
    assert files == ["learning_rate.png", "loss.png", "throughput.png"]
    pictures = [base64.b64decode(address.split(",")[1]) for address in page.addresses]
    pictures += [path.read_bytes() for path in (run_folder / "report").iterdir()]
    for png in pictures:
        image = matplotlib.image.imread(io.BytesIO(png), format="png")
        assert image.shape[0] > 500
        assert image[..., :3].min() < 0.9, "the figure is blank"


def test_a_run_that_has_only_begun(run_folder: Path) -> None:
    for name in ("metrics.jsonl", "samples.jsonl", "environment.json", "run_status.json"):
        (run_folder / name).unlink()
    (run_folder / "evaluation" / "comparison.json").unlink()
    _, page = _page(run_folder)
    for sentence in read_run(run_folder).missing().values():
        assert sentence in page.text
    assert page.addresses == []


def test_one_logged_step_is_enough_for_every_figure(run_folder: Path) -> None:
    row = {"step": 1, "tokens": 8192, "loss": 8.0, "learning_rate": 1e-3, "grad_norm": 0.0, "tokens_per_second": 900.0}
    (run_folder / "metrics.jsonl").write_text(json.dumps(row))
    _, page = _page(run_folder)
    assert len(page.addresses) == 3
    assert "No validation loss is logged yet" in page.text


def test_curves_lie_inside_their_frames(run_folder: Path) -> None:
    run = read_run(run_folder)
    for draw in (plots._draw_loss, plots._draw_learning_rate, plots._draw_throughput):
        figure = Figure()
        draw(figure, run)
        for axes in figure.axes:
            left, right = axes.get_xlim()
            curves = [line for line in axes.lines if line.get_transform() == axes.transData]
            assert curves, draw.__name__
            for line in curves:
                assert left <= min(line.get_xdata()) <= max(line.get_xdata()) <= right, draw.__name__


def test_several_runs_are_laid_over_each_other(
    run_folder: Path, make_run: Callable[..., Path], tmp_path: Path
) -> None:
    other = make_run(tmp_path / "elsewhere" / "demo", learning_rate=2e-3)
    _, page = _page(run_folder, other)
    assert len(page.addresses) == 1 + 2 * 3
    assert "2 runs" in page.text
    assert "elsewhere/demo" in page.text
    runs = [read_run(run_folder), read_run(other)]
    assert label_runs(runs) == ["runs/demo", "elsewhere/demo"]
    differences = recipe_differences(runs, ["a", "b"])
    assert [[cell.text for cell in row] for row in differences.rows] == [["training.learning_rate", "0.001", "0.002"]]


def test_smoothing_keeps_a_line_and_its_length() -> None:
    line = [float(n) for n in range(500)]
    assert smooth(line) == pytest.approx(line)
    assert max(smooth([float(n % 2) for n in range(500)])[50:450]) < 0.6
    assert smooth([3.0]) == [3.0]

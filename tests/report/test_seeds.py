"""Figures and tables of several runs: seeds of one setting are one line with a band, and one row."""

import csv
import dataclasses
import io
from pathlib import Path

import matplotlib
import pytest
from matplotlib.figure import Figure

from gpt2_repro.errors import UserError
from gpt2_repro.report import __main__ as command
from gpt2_repro.report import plots
from gpt2_repro.report.page import label_runs
from gpt2_repro.report.read import Run
from gpt2_repro.report.seeds import group
from gpt2_repro.report.tables import paper_table, runs_csv
from gpt2_repro.run_record import RunRecord
from tests.report.conftest import add, change, write_run


LOSSES = {1e-3: (4.10, 4.12, 4.13), 2e-3: (4.20, 4.19, 4.23)}


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """Six runs: two learning rates with three seeds each."""
    written: list[Path] = []
    for rate, of_seeds in LOSSES.items():
        for seed, loss in enumerate(of_seeds):
            folder = write_run(tmp_path / f"rate{rate}-seed{seed}", learning_rate=rate)
            change(folder / "environment.json", run_identity={"learning_rate": rate, "seed": seed})
            add(folder, step=40, tokens=40 * 8192, eval_loss=loss)
            written.append(folder)
    return written


def drawn(runs: list[Run]) -> list[plots.DrawnSetting]:
    settings: list[plots.DrawnSetting] = []
    for setting, colour in zip(group(runs, label_runs(runs)), ("C0", "C1"), strict=False):
        settings.append(plots.DrawnSetting(setting.runs, setting.name, colour))
    return settings


def test_the_seeds_of_a_setting_are_a_line_with_a_band(folders: list[Path]) -> None:
    runs = [Run(folder) for folder in folders]
    figure = Figure()
    plots.draw_loss(figure, drawn(runs))
    (axes,) = figure.axes
    dots = [line for line in axes.lines if line.get_marker() == "o"]
    assert [line.get_ydata()[-1] for line in dots] == [pytest.approx(4.1166667), pytest.approx(4.2066667)]
    assert [line.get_color() for line in axes.lines[:4]] == ["C0", "C0", "C1", "C1"]
    labels = axes.get_legend_handles_labels()[1]
    assert labels[:2] == ["rate0.001-seed* 4.117 (3 seeds)", "rate0.002-seed* 4.207 (3 seeds)"]
    bars = axes.collections[1].get_segments()  # of the validation losses of the first setting
    assert bars[-1].tolist() == [[40 * 8192, 4.10], [40 * 8192, 4.13]]


def test_a_second_run_with_the_same_seed_is_not_counted(folders: list[Path]) -> None:
    change(folders[1] / "environment.json", run_identity={"learning_rate": 1e-3, "seed": 0})
    assert [len(setting.runs) for setting in group([Run(path) for path in folders], "abcdef")] == [2, 3]


def test_a_figure_of_several_runs_can_be_printed(folders: list[Path], tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    command.main([str(folder) for folder in folders])
    width = int.from_bytes(Path("report/loss.png").read_bytes()[16:20])
    assert width == plots.PRINT_WIDTH * plots.PRINT_DPI == 2100
    assert Path("report/loss.svg").read_text(encoding="utf-8").rstrip().endswith("</svg>")
    with matplotlib.rc_context(fname=plots.STYLE):
        assert min(matplotlib.rcParams["font.size"], matplotlib.rcParams["legend.fontsize"]) >= 8
    assert "a band or bar from the lowest to the highest seed." in Path("report.html").read_text(encoding="utf-8")


def test_long_names_stay_different_in_a_legend() -> None:
    names = ["a" * 40, "b" * 40]
    assert plots._short_names(names) == ["a" * 30, "b" * 30]
    names = ["a" + "c" * 40, "b" + "c" * 40]
    assert plots._short_names(names) == names


def test_a_caption_names_only_what_is_drawn(run_folder: Path) -> None:
    def caption() -> str:
        run = Run(run_folder)
        return plots.figures([run], [run.name])["loss"].caption

    assert "Grey: the bigram model and the unigram model of the training split." in caption()
    assert not any(word in caption() for word in ("published", "seeds", "steep first part"))
    for step in range(1, 201):
        add(run_folder, step=step, tokens=step * 8192, loss=4.1 + 100 * 0.1**step)
    # The unigram model's line would be above the frame.
    assert "Grey: the bigram model of the training split." in caption()
    assert "steep first part" in caption()
    change(run_folder / "environment.json", data={})
    assert "Grey" not in caption()
    metrics = run_folder / "metrics.jsonl"
    lines = metrics.read_text(encoding="utf-8").splitlines(keepends=True)
    metrics.write_text("".join(line for line in lines if "eval_loss" not in line), encoding="utf-8")
    assert "Dots" not in caption() and "Lines" in caption()


def test_the_parts_of_a_number_are_folded(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change(run_folder / "environment.json", startup={"imports": 3.25, "model": 4.5})
    command.main([str(run_folder)])
    out = capsys.readouterr().out
    (line,) = [line for line in out.splitlines() if "last start-up" in line]
    assert line.split() == ["last", "start-up", "8", "s"]
    page = (run_folder / "report.html").read_text(encoding="utf-8")
    assert "<details><summary>parts</summary><span>imports 3.2 s</span><span>model 4.5 s</span></details>" in page


def test_each_table(folders: list[Path], tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    words = [str(folder) for folder in reversed(folders)]
    for form, name in (("csv", "report.csv"), ("latex", "report.tex"), ("markdown", "report.md")):
        command.main([*words, "--table", form])
        assert f"Written: {name}" in capsys.readouterr().out
    lines = list(csv.DictReader(io.StringIO(Path("report.csv").read_text(encoding="utf-8"))))
    assert [line["setting"] for line in lines] == ["1", "1", "1", "2", "2", "2"]
    assert [line["seed"] for line in lines] == ["2", "1", "0"] * 2
    assert [float(line["validation loss (nats/token)"]) for line in lines[3:]] == [4.13, 4.12, 4.10]
    markdown = Path("report.md").read_text(encoding="utf-8").splitlines()
    assert markdown.pop(0).startswith("<!--") and markdown.pop(0) == ""
    assert markdown[0].startswith("| setting | seeds | parameters | tokens | validation loss |")
    assert markdown[2].startswith("| rate0.001-seed* | 3 | 7.4 M | 327,680 | 4.1167 ± 0.0153 |")
    assert markdown[3].startswith("| rate0.002-seed* | 3 |") and len(markdown) == 4
    (folders[0] / "evaluation" / "comparison.json").unlink()
    assert "(2 of 3 seeds)" in paper_table([Run(folder) for folder in folders], "abcdef").markdown()
    latex = Path("report.tex").read_text(encoding="utf-8")
    assert r"4.1167 $\pm$ 0.0153" in latex and r"\toprule" in latex and r"\begin{tabular}{lrrrr" in latex


def test_files_of_the_user_are_not_replaced(folders: list[Path], tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = [str(folder) for folder in folders]
    Path("report.tex").write_text("My paper.", encoding="utf-8")
    with pytest.raises(UserError, match=r"report\.tex was not written by --table"):
        command.main([*words, "--table", "latex"])
    assert Path("report.tex").read_text(encoding="utf-8") == "My paper." and not Path("report.html").exists()
    Path("report").mkdir()
    Path("report", "loss.png").write_bytes(b"my figure")
    with pytest.raises(UserError, match="report was not written by this command"):
        command.main(words)
    Path("report", "loss.png").unlink()
    for _ in range(2):  # its own files are replaced
        command.main([*words, "--table", "markdown"])
    Path("report.html").write_text("my page", encoding="utf-8")
    with pytest.raises(UserError, match=r"report\.html was not written by this command"):
        command.main(words)


def test_a_table_without_losses(run_folder: Path) -> None:
    (run_folder / "metrics.jsonl").unlink()
    (run_folder / "evaluation" / "comparison.json").unlink()
    run = Run(run_folder)
    assert [cell.text for cell in paper_table([run], ["a"]).rows[0]] == ["a", "1", "7.4 M", "327,680"]
    assert runs_csv([run], ["a"]).splitlines()[1].startswith("a,1,,,complete,40")


def test_follow_writes_the_page_until_the_run_ends(run_folder: Path, monkeypatch, capsys) -> None:
    record = RunRecord(run_folder)
    record.claim(record.recipe_text())
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        page = (run_folder / "report.html").read_text(encoding="utf-8")
        assert '<meta http-equiv="refresh"' in page
        if len(waits) == 2:
            record.write_status("complete")

    monkeypatch.setattr(command.time, "sleep", sleep)
    command.main([str(run_folder), "--follow"])
    assert waits == [60, 60] and "refresh" not in (run_folder / "report.html").read_text(encoding="utf-8")
    assert capsys.readouterr().out.splitlines()[-1].startswith("demo: complete, step 40 of 40")


@pytest.mark.parametrize("option", [("--follow",), ("--table", "csv")])
def test_check_writes_no_files(run_folder: Path, option: tuple[str, ...]) -> None:
    with pytest.raises(command.UserError, match="--check writes no files"):
        command.main([str(run_folder), "--check", *option])


def test_a_setting_of_labels_with_one_beginning_has_a_name(run_folder: Path) -> None:
    setting = group([Run(run_folder)], ["a"])[0]
    two = dataclasses.replace(setting, labels=["seed1", "seed11"])
    assert two.name == "seed*"
    two = dataclasses.replace(setting, labels=["lr3-42", "lr3-43"])
    assert two.name == "lr3-*"

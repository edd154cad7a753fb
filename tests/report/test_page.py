"""The report command reads complete, incomplete and damaged runs."""

import html
import json
import math
import re
import shutil
from pathlib import Path

import pytest
from scipy import stats

from gpt2_repro.report.__main__ import main
from gpt2_repro.report.page import recipe_differences, run_table
from gpt2_repro.report.read import Run, points
from gpt2_repro.report.seeds import setting_table
from tests.report.conftest import SAMPLE, add, change, write_run


BUCKET = {"label": "validation text", "tokens": 9, "ours": 4.0, "theirs": 4.3}
BUCKET |= {"difference": {"value": -0.3, "stderr": 0.01}}
DIAGNOSIS = {"models": [{"name": "final"}, {"name": "openai-community/gpt2"}], "domains": [BUCKET], "positions": []}


class _Page:
    """An HTML page: its source, its text, and all addresses that a browser would load."""

    def __init__(self, path: Path) -> None:
        self.source = path.read_text(encoding="utf-8")
        self.text = html.unescape(re.sub(r"<[^>]*>", "", self.source)).replace("\xa0", " ")
        self.addresses = re.findall(r"""\b(?:src|srcset|href|data)\s*=\s*["']?([^"'\s>]*)""", self.source)


@pytest.fixture
def recorded(run_folder: Path) -> Path:
    """A finished run with an extra validation set, a diagnosis and an hourly price."""
    scored = {"hellaswag_items": 10_042, "eval_tokens": 10_485_760}
    for step, loss, accuracy in ((20, 4.6, 0.27), (40, 4.123, 0.3012)):
        add(run_folder, step=step, eval_loss=loss, hellaswag_acc=accuracy, eval_wikitext_loss=loss + 1, **scored)
    add(run_folder, step=40, loss=4.1, padding=0.0625)
    deviation = {"field": "model.dropout", "run": "0.1", "recipe": "0"}
    change(run_folder / "environment.json", usd_per_hour=14.0, deviations=[deviation])
    change(run_folder / "run_status.json", seconds=3600, time_breakdown={"training": 3300, "saving": 300})
    (run_folder / "evaluation" / "diagnosis").mkdir()
    change(run_folder / "evaluation" / "diagnosis" / "diagnosis.json", **DIAGNOSIS)
    return run_folder


def test_the_whole_record_is_on_the_page_and_in_the_summary(recorded: Path, capsys) -> None:
    main([str(recorded)])
    page, out = _Page(recorded / "report.html"), capsys.readouterr().out
    for words in ("step 40 of 40", "4.123", "bigram 4.601", "0.3012", "$14.00", "41.3 GB", "0.2012 ± 0.0055"):
        assert words in page.text and words in out, words
    for words in ("2813412", "learning_rate: 0.001", "model.dropout", "Loss by domain"):
        assert words in page.text, words
    # The markup of a sample has no effect, and the page loads no other files.
    assert SAMPLE in page.text and "<script" not in page.source
    assert not re.search(r"@import|url\(", page.source)
    assert all(address.startswith("data:image/png;base64,") for address in page.addresses)
    files = {path.name for path in (recorded / "report").iterdir()}
    assert files == {f"{name}.{form}" for name in ("hellaswag", "loss", "training") for form in ("png", "svg")}


def test_a_run_that_has_only_begun(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(run_folder / "evaluation")
    for path in run_folder.glob("*.json*"):
        path.unlink()
    main([str(run_folder)])
    page, out = _Page(run_folder / "report.html"), capsys.readouterr().out
    missing = Run(run_folder).missing()
    assert set(missing) == {"training", "validation", "samples", "evaluation", "environment"}
    assert all(sentence in page.text and sentence in out for sentence in missing.values())
    assert page.addresses == []


def test_several_runs_share_the_figures(run_folder: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    other = write_run(tmp_path / "elsewhere" / "demo", learning_rate=2e-3)
    add(other, step=40, tokens=40 * 8192, eval_loss=4.1, hellaswag_acc=0.3, hellaswag_items=100)
    change(other / "environment.json", data={"tokenizer_sha256": "b"}, usd_per_hour=14.0)
    change(run_folder / "environment.json", data={"tokenizer_sha256": "a"})
    monkeypatch.chdir(tmp_path)
    main([str(run_folder), str(other)])
    page, out = _Page(tmp_path / "report.html"), capsys.readouterr().out
    assert len(page.addresses) == 3 and not (run_folder / "report.html").exists()
    differences = recipe_differences([Run(run_folder), Run(other)], ["a", "b"])
    assert [[cell.text for cell in row] for row in differences.rows] == [["training.learning_rate", "0.001", "0.002"]]
    assert all("different tokenizers" in text for text in (page.text, out))
    # The run with the lowest loss is first. A mean over seeds is not the score of a run.
    path = other / "evaluation" / "comparison.json"
    comparison = json.loads(path.read_text(encoding="utf-8"))
    comparison["rows"][0]["values"]["demo"]["seeds"] = [0.2, 0.2024]
    path.write_text(json.dumps(comparison), encoding="utf-8")
    table = run_table([Run(run_folder), Run(other)], ["a", "b"])
    columns = [table.headers.index(name) for name in ("run", "validation loss (nats/token)", "lambada_openai acc")]
    texts = [[row[column].text for column in columns] for row in table.rows]
    assert texts == [["b", "4.100", "–"], ["a", "4.123", "0.2012"]]


def test_published_losses_are_those_of_the_same_data(run_folder: Path) -> None:
    add(run_folder, step=40, hellaswag_acc=0.3, hellaswag_items=10_042, eval_tokens=10_485_760)
    assert "GPT-2" not in Run(run_folder).reference_losses
    fineweb = {"source": "fineweb-10bt", "split": "head", "packing": "concat", "tokenizer": "openai-community/gpt2"}
    change(run_folder / "environment.json", data={"request": fineweb}, parameters=124_439_808)
    run = Run(run_folder)
    assert run.reference_losses == {"GPT-2": 3.424958}
    assert run.reference_scores == {"GPT-2": 0.294463, "GPT-3": 0.337}
    add(run_folder, step=40, eval_loss=4.0, hellaswag_items=100)
    assert Run(run_folder).reference_scores == {}  # published scores are for all 10,042 items


def test_a_resumed_run_is_one_curve(run_folder: Path) -> None:
    whole = Run(run_folder)
    with (run_folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 41, "tok')
    assert vars(Run(run_folder)) == vars(whole) and whole.broken_lines == 0  # a kill tore the last line
    add(run_folder)  # the end of the torn line
    add(run_folder, step=7, loss=1.5)
    add(run_folder, step=8, loss=math.nan)
    add(run_folder, step=9, loss=None)
    run = Run(run_folder)
    tokens, losses = points(run.training, "loss")
    assert tokens == [8192 * step for step in range(1, 41) if step not in (8, 9)] and losses[6] == 1.5
    assert run.non_finite_steps == [8, 9] and run.broken_lines == 1


def test_runs_that_differ_only_in_the_seed_are_one_setting(tmp_path: Path, monkeypatch, capsys) -> None:
    """The interval of two settings is that of a t-test, with the seeds as the unit."""
    losses = {1e-3: (4.10, 4.12, 4.13), 2e-3: (4.20, 4.19, 4.23)}
    for rate, of_seeds in losses.items():
        for seed, loss in enumerate(of_seeds):
            identity = [("learning_rate", rate), ("optim", "muon"), ("seed", seed)]  # versions have other orders
            folder = write_run(tmp_path / f"rate{rate}-seed{seed}", learning_rate=rate)
            change(folder / "environment.json", run_identity=dict(identity[:: 1 - 2 * (seed % 2)]))
            add(folder, step=40, tokens=40 * 8192, loss=4.0)
            add(folder, step=40, tokens=40 * 8192, eval_loss=loss, eval_bits_per_byte=loss / 3)
    paths = sorted(path for path in tmp_path.iterdir() if path.is_dir())
    runs = [Run(path) for path in paths]
    table = setting_table(runs, [run.name for run in runs])
    (best, other) = ([cell.text for cell in row] for row in table.rows)
    low, high = stats.ttest_ind(losses[2e-3], losses[1e-3]).confidence_interval(0.95)
    assert best[:3] == ["rate0.001-seed*", "3", "4.1167 ± 0.0153"]
    assert other[3] == f"+{(low + high) / 2:.4f} ± {(high - low) / 2:.4f}" and other[4] == "higher"
    # Of three settings, the lowest mean is partly luck: Tukey's interval is wider than Student's.
    third = [Run(run.path) for run in runs[3:]]
    for run, loss in zip(third, (4.30, 4.31, 4.29), strict=True):
        run.setting = "third"
        run.validation[-1]["eval_loss"] = loss
    tukey = stats.tukey_hsd(losses[1e-3], losses[2e-3], (4.30, 4.31, 4.29)).confidence_interval(0.95)
    (_, second, _) = setting_table([*runs, *third], [*"abcdefghi"]).rows
    assert second[3].text.endswith(f"± {(tukey.high[1, 0] - tukey.low[1, 0]) / 2:.4f}")
    identity = runs[0].environment.run_identity
    for of_data, mean in ((0, "4.1000"), (1, "4.1100 ± 0.0141")):  # by default, data_seed is the seed: 0
        change(paths[1] / "environment.json", run_identity={**identity, "data_seed": of_data})
        (one, other) = setting_table([runs[0], Run(paths[1]), runs[3]], [*"aab"]).rows
        assert one[2].text == mean and ("unknown" in other[4].text) == (of_data == 0)
    change(paths[1] / "environment.json", run_identity={**identity, "seed": 1})
    monkeypatch.chdir(tmp_path)
    main(list(map(str, paths)))
    assert "1.3667" in _Page(tmp_path / "report.html").text  # bits per byte of the first run
    assert (tmp_path / "report" / "loss.png").is_file() and "rate0.001-seed*" in capsys.readouterr().out


def test_expected_loss_only_for_fineweb_with_gpt2s_tokenizer(run_folder: Path) -> None:
    assert Run(run_folder).expected is None
    plan = json.loads((run_folder / "environment.json").read_text(encoding="utf-8"))["plan"]
    plan |= {"tokens_per_step": 524_288, "max_steps": 18_865}
    for source, parameters, loss in (
        ("fineweb-10bt", 124_439_808, 3.28),  # llm.c's run, to which the formula is fitted
        ("HuggingFaceFW/fineweb:sample-100BT", 354_823_168, 3.055),
        ("fineweb-edu-10bt", 124_439_808, None),
    ):
        request = {"source": source, "tokenizer": "openai-community/gpt2"}
        change(run_folder / "environment.json", plan=plan, parameters=parameters, data={"request": request})
        expected = Run(run_folder).expected
        assert (expected and expected[0]) == (None if loss is None else pytest.approx(loss, abs=0.01))
    mixed = {"source": "HuggingFaceFW/fineweb:sample-100BT=0.7,own.txt=0.3", "tokenizer": "openai-community/gpt2"}
    change(run_folder / "environment.json", data={"request": mixed, "mixture": []})
    assert Run(run_folder).expected is None


def test_final_model_that_follow_has_scored_is_evaluated(run_folder: Path) -> None:
    scored = run_folder / "evaluation/final/comparison.json"
    scored.parent.mkdir()
    (run_folder / "evaluation/comparison.json").rename(scored)
    run = Run(run_folder)
    assert run.comparison and run.comparison.rows and "evaluation" not in run.missing()

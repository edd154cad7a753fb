"""The command, as a user types it."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gpt2_repro.errors import UserError
from gpt2_repro.report.__main__ import main


ROOT = Path(__file__).parents[2]


def test_the_summary_says_how_it_went_and_where_it_is(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(run_folder)])
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == "demo: complete, step 40 of 40, 327,680 tokens"
    assert "validation loss 4.123 nats/token; interpolated bigram 4.601, unigram 6.713" in lines
    assert "median 9,020 tokens/s, 4 min 12 s wall time" in lines
    assert any(line.startswith("lambada_openai  acc ↑") and line.endswith(" worse") for line in lines)
    places = [run_folder / name for name in ("final", "metrics.jsonl", "evaluation/comparison.md", "report.html")]
    assert [line.split()[-1] for line in lines[-4:]] == [str(place) for place in places]
    assert (run_folder / "report.html").is_file()


def test_several_runs_write_one_page_here(
    run_folder: Path,
    make_run: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    other = make_run(tmp_path / "runs" / "other")
    monkeypatch.chdir(tmp_path)
    main([str(run_folder), str(other)])
    page = (tmp_path / "report.html").read_text()
    assert "<h2>demo</h2>" in page
    assert "<h2>other</h2>" in page
    assert not (run_folder / "report.html").exists()
    assert "other: complete" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        ({"tokenizer_sha256": "a"}, {"tokenizer_sha256": "b"}, "The runs have different tokenizers"),
        ({"sha256": {"validation": "a"}}, {"sha256": {"validation": "b"}}, "The runs validate on different rows"),
        ({"tokenizer_sha256": "a"}, {"tokenizer_sha256": "a"}, ""),
        ({}, {"tokenizer_sha256": "a"}, ""),
    ],
)
def test_losses_that_do_not_compare_are_named(
    run_folder: Path,
    make_run: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    ours: dict,
    theirs: dict,
    said: str,
) -> None:
    other = make_run(tmp_path / "runs" / "other")
    for folder, data in ((run_folder, ours), (other, theirs)):
        environment = json.loads((folder / "environment.json").read_text())
        environment["data"] |= data
        (folder / "environment.json").write_text(json.dumps(environment))
    main([str(run_folder), str(other), "-o", str(tmp_path / "page.html")])
    page, terminal = (tmp_path / "page.html").read_text(), capsys.readouterr().out
    assert said in page and said in terminal
    assert ("The runs " in page.replace("The runs compare only", "")) == bool(said)


def test_the_page_goes_where_it_is_told(run_folder: Path, tmp_path: Path) -> None:
    main([str(run_folder), "-o", str(tmp_path / "new" / "page.html")])
    assert (tmp_path / "new" / "page.html").is_file()
    with pytest.raises(UserError, match=r"report\.html"):
        main([str(run_folder), "-o", str(tmp_path)])
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"-o report\.html"):
        main([str(run_folder), "-o", str(tmp_path / "file" / "page.html")])


def test_a_folder_that_is_no_run_ends_in_one_line_and_code_2(run_folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "gpt2_repro.report", str(tmp_path / "runs" / "dmo")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1 and str(run_folder) in done.stderr


def test_reading_a_run_needs_neither_torch_nor_matplotlib() -> None:
    code = "import sys, gpt2_repro.report.__main__; print({'torch', 'transformers', 'matplotlib'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"

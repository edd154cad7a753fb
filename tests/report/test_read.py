"""The report can read complete, running, killed, resumed and damaged runs."""

import json
import math
from pathlib import Path

import pytest

from gpt2_repro.errors import UserError
from gpt2_repro.evaluation.references import GPT2, baseline_of, published_loss
from gpt2_repro.report.read import points, read_run
from gpt2_repro.report.tables import baseline_losses, count, hellaswag_lines
from gpt2_repro.text import duration
from tests.report.conftest import add, change


def test_the_last_value_of_a_step_wins_and_only_finite_ones_are_drawn(run_folder: Path) -> None:
    add(run_folder, step=7, loss=1.5)
    add(run_folder, step=40, eval_loss=4.0)
    add(run_folder, step=8, loss=math.nan)
    add(run_folder, step=9, loss=None)
    run = read_run(run_folder)
    tokens, losses = points(run.training, "loss")
    assert tokens == [8192 * step for step in range(1, 41) if step not in (8, 9)] and losses[6] == 1.5
    assert run.non_finite_steps == [8, 9]
    assert points(run.validation, "eval_loss") == ([20 * 8192, 40 * 8192], [4.6, 4.0])


def test_a_torn_last_line_is_ignored_and_one_that_was_continued_is_counted(run_folder: Path) -> None:
    whole = read_run(run_folder)
    with (run_folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 41, "tok')
    assert read_run(run_folder) == whole and whole.broken_lines == 0
    with (run_folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 41, "loss": 4.0}\n{"step": 42, "loss": 3.9}\n')
    run = read_run(run_folder)
    assert run.broken_lines == 1 and run.training[-1] == {"step": 42, "loss": 3.9}


def test_the_log_is_newer_than_the_status_of_step_0(run_folder: Path) -> None:
    """A killed run has written its status once, after the validation of step 0."""
    (run_folder / "run_status.json").write_text(
        json.dumps({"state": "running", "step": 0, "max_steps": 40}), encoding="utf-8"
    )
    status = read_run(run_folder).status
    assert (status.state, status.step, status.tokens) == ("running", 40, 40 * 8192)


def test_a_sample_keeps_its_odd_line_ends(run_folder: Path) -> None:
    sample = {"step": 40, "prompt": "odd", "text": "odd\u2028line\x85ends"}
    (run_folder / "samples.jsonl").write_text(json.dumps(sample, ensure_ascii=False) + "\n", encoding="utf-8")
    assert read_run(run_folder).samples == [sample]


def test_a_path_that_is_not_a_run_is_refused(run_folder: Path) -> None:
    wrong = (run_folder.parent, run_folder / "final", run_folder / "gone", run_folder.with_name("demoo"))
    for path in wrong:
        with pytest.raises(UserError, match=f" {run_folder}[.?]"):
            read_run(path)
    with pytest.raises(UserError, match="--output_dir"):
        read_run(Path("nowhere"))


def test_published_baselines_are_drawn_on_their_own_data_only(run_folder: Path) -> None:
    score = {"hellaswag_acc": 0.3, "hellaswag_items": 10_042, "eval_tokens": 10_485_760}
    add(run_folder, step=40, **score)
    assert baseline_losses(read_run(run_folder)) == {}
    fineweb = {"source": "fineweb-10bt", "split": "head", "packing": "concat", "tokenizer": "openai-community/gpt2"}
    change(run_folder / "environment.json", data={"request": fineweb}, parameters=124_439_808)
    run = read_run(run_folder)
    assert baseline_losses(run) == {"GPT-2": 3.424958}
    assert hellaswag_lines(run) == {"GPT-2": 0.294463, "GPT-3": 0.337}
    add(run_folder, step=40, eval_loss=4.0, hellaswag_items=100)
    assert hellaswag_lines(read_run(run_folder)) == {}  # published scores are for all 10,042 items
    edu = fineweb | {"source": "fineweb-edu-10bt-tokens", "split": "source"}
    assert published_loss(GPT2, edu, 10_485_760) == 3.2924
    for other in ({"source": "openwebtext"}, {"split": "hash"}, {"packing": "wrap"}, {"tokenizer": "train:300"}):
        assert published_loss(GPT2, fineweb | other, 10_485_760) is None
    assert published_loss(GPT2, fineweb, 10_000_000) is None


def test_the_baseline_has_the_nearest_size() -> None:
    names = [baseline_of(parameters).name for parameters in (None, 1e6, 1.3e8, 8e8)]
    assert names == ["GPT-2", "GPT-2", "GPT-2", "GPT-2 large"]


def test_numbers_are_formatted() -> None:
    assert [count(n) for n in (None, 16_384, 124_439_808, 9_890_693_120)] == ["–", "16,384", "124.4 M", "9.89 B"]
    seconds = (None, 45.2, 252, 11_100, 183_600)
    assert [duration(n) for n in seconds] == ["–", "45 s", "4 min 12 s", "3 h 05 min", "2 d 3 h"]

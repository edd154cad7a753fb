"""Reading a run folder, whole, in progress, killed and resumed."""

import json
import math
from pathlib import Path

import pytest

from gpt2_repro.errors import UserError
from gpt2_repro.report.facts import count, facts
from gpt2_repro.report.read import points, read_run
from gpt2_repro.units import duration


def test_the_last_value_of_a_step_wins(run_folder: Path) -> None:
    with (run_folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "tokens": 57344, "loss": 1.5}\n{"step": 40, "tokens": 327680, "eval_loss": 4.0}\n')
    run = read_run(run_folder)
    tokens, losses = points(run.training, "loss")
    assert tokens == [8192 * step for step in range(1, 41)]
    assert losses[6] == 1.5
    assert points(run.validation, "eval_loss") == ([20 * 8192, 40 * 8192], [4.6, 4.0])
    assert facts(run).validation_loss == 4.0


def test_a_truncated_last_line_is_ignored(run_folder: Path) -> None:
    whole = read_run(run_folder)
    with (run_folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 41, "tokens": 335')
    cut = read_run(run_folder)
    assert cut == whole
    assert cut.broken_lines == 0


def test_a_line_broken_by_a_kill_and_written_on_is_counted(run_folder: Path) -> None:
    with (run_folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 41, "tok{"step": 41, "loss": 4.0}\n{"step": 42, "loss": 3.9}\n')
    run = read_run(run_folder)
    assert run.broken_lines == 1
    assert run.training[-1] == {"step": 42, "loss": 3.9, "tokens": 42 * 8192}  # by the plan, where it was not said


def test_a_sample_keeps_its_odd_line_ends(run_folder: Path) -> None:
    sample = {"step": 40, "prompt": "odd", "text": "odd\u2028line\x85ends"}
    with (run_folder / "samples.jsonl").open("a") as file:
        file.write(json.dumps(sample, ensure_ascii=False) + "\n")
    assert read_run(run_folder).samples[-1] == sample


def test_a_loss_that_is_no_number_is_kept_in_sight(run_folder: Path) -> None:
    with (run_folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "tokens": 40960, "loss": NaN}\n{"step": 6, "tokens": 49152, "loss": null}\n')
    run = read_run(run_folder)
    assert run.non_finite_steps == [5, 6]
    assert all(math.isfinite(loss) for loss in points(run.training, "loss")[1])


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("data:\n  source: embedded\n")
    run = read_run(tmp_path)
    assert run.recipe == {"data": {"source": "embedded"}}
    missing = run.missing()
    assert set(missing) == {"training", "validation", "samples", "evaluation", "environment", "status"}
    assert "samples.jsonl" in missing["samples"]
    assert "no final/" in missing["evaluation"]


def test_the_missing_evaluation_comes_with_its_command(run_folder: Path) -> None:
    (run_folder / "evaluation" / "comparison.json").unlink()
    assert read_run(run_folder).missing() == {"evaluation": f"Not evaluated yet: bash evaluate.sh {run_folder}/final"}


@pytest.mark.parametrize(
    ("typed", "advice"),
    [
        ("runs/dmo", "did you mean '{root}/runs/demo'"),
        ("runs", "runs/demo"),
        ("runs/demo/final", "report {root}/runs/demo"),
    ],
)
def test_a_path_that_is_no_run_says_what_to_type(run_folder: Path, tmp_path: Path, typed: str, advice: str) -> None:
    with pytest.raises(UserError) as error:
        read_run(tmp_path / typed)
    assert advice.format(root=tmp_path) in str(error.value)


def test_where_there_is_no_run_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"--output_dir"):
        read_run(Path("nothing"))


def test_a_damaged_record_is_named(run_folder: Path) -> None:
    (run_folder / "environment.json").write_text('{"parameters": ')
    with pytest.raises(UserError, match=r"environment\.json"):
        read_run(run_folder)


def test_facts_of_a_run_in_progress(run_folder: Path) -> None:
    status = '{"state": "running", "step": 20, "max_steps": 40, "tokens": 163840, "seconds": 10}'
    (run_folder / "run_status.json").write_text(status)
    numbers = facts(read_run(run_folder))
    assert numbers.tokens_per_second == 9020.5
    assert numbers.total_tokens == 40 * 8192
    assert numbers.seconds_left == pytest.approx(20 * 8192 / 9020.5)


def test_numbers_as_a_person_reads_them() -> None:
    assert [count(n) for n in (None, 16_384, 124_439_808, 9_890_693_120)] == ["–", "16,384", "124.4 M", "9.89 B"]
    seconds = (None, 45.2, 252, 11_100, 183_600)
    assert [duration(n) for n in seconds] == ["–", "45 s", "4 min 12 s", "3 h 05 min", "2 d 3 h"]

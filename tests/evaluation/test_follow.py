"""evaluate.sh --follow scores each checkpoint of a run once, while the run writes and deletes them."""

import copy
import json
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from safetensors.torch import load_file

from gpt2_repro.checkpoints.manifest import seal
from gpt2_repro.errors import BadCheckpoint, RunFailed, UserError
from gpt2_repro.evaluation import __main__ as command
from gpt2_repro.evaluation import follow
from gpt2_repro.evaluation.arguments import options_of_scores, override_arguments, parse_options
from gpt2_repro.model import checkpoint
from gpt2_repro.recipe import EvaluationArguments
from gpt2_repro.report.plots import figures
from gpt2_repro.report.read import Run, scores_of_checkpoints
from gpt2_repro.run_record import RunRecord
from tests.evaluation.conftest import write_rows
from tests.report.conftest import change
from tests.training.test_copying import Objects


STATE = "rng_state_0.pth"  # a file that no model needs


LOOKS = 4  # at the run in a test, after each of which the follower waits


class Ended(Exception):
    """The follower has looked at the run several times, and still waits."""


@pytest.fixture
def run(model, tokenizer, tmp_path, monkeypatch) -> Path:
    """Return a running run with the checkpoints 1 and 2."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(follow.os, "nice", lambda more: more)

    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) % LOOKS == 0:
            raise Ended

    monkeypatch.setattr(follow.time, "sleep", wait)
    folder = tmp_path / "runs" / "tiny"
    for step in (1, 2):
        save(folder / f"checkpoint-{step}", model, tokenizer, step)
    (folder / "recipe.yaml").write_text("data: {sequence_length: 64}", encoding="utf-8")
    (folder / "environment.json").write_text('{"run_identity": {"seed": 1}}', encoding="utf-8")
    (folder / "metrics.jsonl").write_text('{"step": 1, "time": 1.5}\n', encoding="utf-8")
    (folder / "run_status.json").write_text('{"state": "running"}', encoding="utf-8")
    return folder


def save(folder: Path, model, tokenizer, step: int, **facts: object) -> None:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / STATE).write_bytes(b"0")
    seal(folder, {}, run_identity={"seed": 1}, tokens=step * 1000, step=step, **facts)


class Scores:
    """Stands for a scorer: it records what it is given, and writes a comparison."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __call__(self, one: checkpoint.Checkpoint, folder: Path) -> None:
        self.names.append(folder.name)
        assert load_file(Path(one.copy, "model.safetensors"))
        assert not Path(one.copy, STATE).exists()
        assert one.tokens_trained
        folder.mkdir(parents=True, exist_ok=True)


class Fails(Scores):
    """Stands for a scorer that cannot score some checkpoints, and records all that it is given."""

    def __init__(self, **errors: Exception) -> None:
        super().__init__()
        self.errors = {name.replace("_", "-"): error for name, error in errors.items()}

    def __call__(self, one: checkpoint.Checkpoint, folder: Path) -> None:
        super().__call__(one, folder)
        if folder.name in self.errors:
            raise self.errors[folder.name]


def followed(name: Path | str, scores: Scores, output: Path | None = None, **options: object) -> list[str]:
    """Follow until nothing is new, and return the names of the scored folders, with "waits" if the run continues."""
    before = len(scores.names)
    try:
        follow.follow(str(name), output, scores, options)
    except Ended:
        scores.names.append("waits")
    return scores.names[before:]


def end(run: Path, state: str = "complete", **values: object) -> None:
    change(run / "run_status.json", state=state, **values)


def test_each_checkpoint_is_scored_once_the_newest_first(run, model, tokenizer) -> None:
    scores = Scores()
    assert followed(run, scores) == ["checkpoint-2", "checkpoint-1", "waits"]
    save(run / "checkpoint-3", model, tokenizer, 3, rolling=True)
    (run / "checkpoint-4").mkdir()  # incomplete
    assert followed(run, scores) == ["waits"]
    shutil.rmtree(run / "checkpoint-2")  # the run went back, and trained the step again
    save(run / "checkpoint-2", model, tokenizer, 2, guard={})
    save(run / "final", model, tokenizer, 5, environment={"run_identity": {"seed": 1}})
    assert followed(run, scores) == ["final", "checkpoint-2", "waits"], "a finished run can continue"
    end(run)
    assert followed(run, scores) == []
    assert {path.name for path in run.iterdir()} >= {"checkpoint-1", "checkpoint-3", "final"}


def test_checkpoint_that_is_deleted_while_it_is_scored(run) -> None:
    class Deletes(Scores):
        def __call__(self, one: checkpoint.Checkpoint, folder: Path) -> None:
            shutil.rmtree(run / folder.name)
            super().__call__(one, folder)

    assert followed(run, Deletes()) == ["checkpoint-2", "checkpoint-1", "waits"]
    assert not list((run / "evaluation").glob(f"{follow.SNAPSHOT}*"))


def test_checkpoint_that_is_deleted_before_it_is_scored(run, monkeypatch) -> None:
    original = follow._fetch

    def fetch(place, name: str, target: Path) -> str:
        shutil.rmtree(run / "checkpoint-2", ignore_errors=True)
        return original(place, name, target)

    monkeypatch.setattr(follow, "_fetch", fetch)
    end(run)
    assert followed(run, Scores()) == ["checkpoint-1"], "and exit code 0"


def damage(run: Path) -> None:
    with (run / "checkpoint-2/model.safetensors").open("r+b") as file:
        file.write(b"damage")


def lose(run: Path) -> None:
    (run / "checkpoint-2/model.safetensors").unlink()


@pytest.mark.parametrize("change_run", [damage, lose])
def test_checkpoint_with_bad_files_is_named_and_the_others_are_scored(run, change_run) -> None:
    change_run(run)
    assert followed(run, Scores()) == ["checkpoint-1", "waits"]
    end(run)
    with pytest.raises(RunFailed, match="checkpoint-2"):
        followed(run, Scores())


@pytest.mark.parametrize("error", [RunFailed("NaN"), BadCheckpoint("NaN"), torch.OutOfMemoryError(), MemoryError()])
def test_model_that_cannot_be_scored_is_tried_once_in_a_command(run, error: Exception) -> None:
    assert followed(run, Fails(checkpoint_2=error)) == ["checkpoint-2", "checkpoint-1", "waits"]
    end(run)
    scores = Fails(checkpoint_2=error)
    with pytest.raises(RunFailed, match="checkpoint-2"):
        followed(run, scores)
    assert scores.names == ["checkpoint-2"], "the next command tries it again"
    assert followed(run, Scores()) == ["checkpoint-2"]
    assert followed(run, Scores()) == []


def test_wrong_option_ends_the_command_at_the_first_checkpoint(run) -> None:
    scores = Fails(checkpoint_2=UserError("There is no task 'hellswag'."))
    with pytest.raises(UserError):
        followed(run, scores)
    assert scores.names == ["checkpoint-2"]


def now() -> str:
    return datetime.now(UTC).isoformat()


@pytest.mark.parametrize("state", ["complete", "stopped", "diverged", "failed"])
def test_the_command_ends_with_the_run(run, state: str) -> None:
    end(run, state, updated=now())
    assert followed(run, Scores()) == ["checkpoint-2", "checkpoint-1"]
    (run / "final").mkdir()
    assert followed(run, Scores()) == []


@pytest.mark.parametrize(
    ("state", "ago", "waits"),
    [("failed", 0, True), ("failed", 7, False), ("complete", 0, False), ("diverged", 0, False), ("stopped", 0, False)],
)
def test_a_supervised_run_that_failed_may_be_restarted(run, state: str, ago: float, waits: bool) -> None:
    end(run, state, updated=(datetime.now(UTC) - timedelta(minutes=ago)).isoformat(), is_supervised=True)
    assert followed(run, Scores()) == ["checkpoint-2", "checkpoint-1"] + ["waits"] * waits


def test_a_killed_run_has_ended(run) -> None:
    record = RunRecord(run)
    record.claim("")
    assert followed(run, Scores()) == ["checkpoint-2", "checkpoint-1", "waits"]
    record.unlock()
    assert followed(run, Scores()) == []


def test_other_options_are_other_scores(run) -> None:
    both = ["checkpoint-2", "checkpoint-1"]
    end(run)
    assert followed(run, Scores(), limit=3) == both
    assert followed(run, Scores(), limit=3) == []
    assert followed(run, Scores(), limit=None) == both
    (run / "recipe.yaml").write_text("evaluation: {max_length: 32}", encoding="utf-8")
    assert followed(run, Scores(), limit=None) == both
    assert followed(run, Scores(), limit=None) == []


def options(words: str) -> dict[str, Any]:
    return options_of_scores(parse_options(f"run --follow {words}".split(), description=None))


@pytest.mark.parametrize("words", ["--limit 3", "--tasks piqa", "--suite quick", "--max_length 9", "--local_data d"])
def test_each_option_that_changes_scores_is_recorded(words: str) -> None:
    assert options(words) != options("")
    assert json.loads(json.dumps(options(words))) == options(words)


@pytest.mark.parametrize("words", ["--no_cache", "--device cpu", "--batch_size 2", "--output_dir other"])
def test_other_options_are_not_recorded(words: str) -> None:
    assert options(words) == options("")


def test_a_run_may_begin_later(run, tmp_path, monkeypatch, caplog) -> None:
    caplog.set_level("INFO")
    later = tmp_path / "runs" / "later"
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            shutil.copytree(run, later)
        if len(waits) == 5:
            raise Ended

    monkeypatch.setattr(follow.time, "sleep", wait)
    assert followed(later, Scores()) == ["checkpoint-2", "checkpoint-1", "waits"]
    assert caplog.text.count("waiting for a run in") == 1
    monkeypatch.setattr(follow, "START_SECONDS", -1.0)
    with pytest.raises(UserError, match="has no run"):
        followed(tmp_path / "runs" / "typo", Scores())
    model = tmp_path / "model"
    shutil.copytree(run / "checkpoint-1", model)
    monkeypatch.setattr(follow, "START_SECONDS", 300.0)
    with pytest.raises(UserError, match="has no run"):
        followed(model, Scores())


def test_copies_at_a_place_are_followed_with_their_log(run, tmp_path) -> None:
    fsspec.register_implementation("objects", Objects, clobber=True)
    name, mirror = f"objects://{tmp_path.name}/run", Path("evaluations", f"objects-{tmp_path.name}-run")
    try:
        assert followed(name, Scores()) == ["waits"], "there is no run yet"
        assert not mirror.exists()
        fsspec.filesystem("objects").put(str(run), name, recursive=True)
        assert followed(name, Scores()) == ["checkpoint-2", "checkpoint-1", "waits"]
        assert (mirror / "environment.json").read_bytes() == (run / "environment.json").read_bytes()
        assert followed(name, Scores()) == ["waits"]
        for minutes, names in ((0, ["waits"]), (7, [])):  # the files of the last save arrive after the status
            end(run, updated=(datetime.now(UTC) - timedelta(minutes=minutes)).isoformat())
            fsspec.filesystem("objects").put(str(run / "run_status.json"), f"{name}/run_status.json")
            assert followed(name, Scores()) == names
    finally:
        Objects.store.clear()


def test_scores_of_another_run_are_kept(run) -> None:
    output = Path("scores")
    assert followed(run, Scores(), output) == ["checkpoint-2", "checkpoint-1", "waits"]
    change(run / "environment.json", run_identity={"seed": 2})
    (run / "metrics.jsonl").write_text('{"step": 1, "time": 9.5}\n', encoding="utf-8")
    with pytest.raises(UserError):
        followed(run, Scores(), output)


def test_a_run_stays_the_same_run(run, model, tokenizer) -> None:
    output = Path("scores")
    assert followed(run, Scores(), output) == ["checkpoint-2", "checkpoint-1", "waits"]
    # A start at step 0 with the same settings.
    (run / "metrics.jsonl").write_text('{"step": 1, "time": 9.5}\n', encoding="utf-8")
    shutil.rmtree(run / "checkpoint-2")
    save(run / "checkpoint-2", model, tokenizer, 2, guard={})
    assert followed(run, Scores(), output) == ["checkpoint-2", "waits"]
    # Settings that were changed with --allow_resume_change, twice.
    for seed in (2, 3):
        change(run / "environment.json", run_identity={"seed": seed})
        assert followed(run, Scores(), output) == ["waits"]
    (run / "metrics.jsonl").write_text('{"step": 1, "time": 10.5}\n', encoding="utf-8")
    assert followed(run, Scores(), output) == ["waits"]


def test_only_one_process_writes_to_a_folder(run) -> None:
    with follow._locked(run / "evaluation"), pytest.raises(UserError):
        followed(run, Scores())


def test_scores_become_curves_of_the_report(run, prose, capsys) -> None:
    write_rows(Path("data/text/validation.jsonl"), ({"text": document} for document in prose))
    words = ["runs/tiny", "--follow", "--local_data", "data", "--tasks", "document_perplexity", "last_word"]
    with pytest.raises(Ended):
        command.main(words)
    comparison = json.loads((run / "evaluation/checkpoint-2/comparison.json").read_text(encoding="utf-8"))
    assert comparison["models"][0]["source"] == "runs/tiny/checkpoint-2"
    written = Run(run)
    curves = scores_of_checkpoints(written)
    assert [tokens for tokens, _ in curves.values()] == [[1000, 2000]] * 3
    assert curves["document_perplexity bits_per_byte ↓"][1] == [
        one.rows[2].values[one.models[0].name].value for one in written.followed
    ]
    assert list(figures([written], ["tiny"])) == ["scores"]


def test_weights_that_are_not_finite_are_named_and_the_others_are_scored(run, model, tokenizer, prose) -> None:
    write_rows(Path("data/text/validation.jsonl"), ({"text": document} for document in prose))
    broken = copy.deepcopy(model)
    broken.transformer.h[0].attn.c_attn.bias.data[3] = float("nan")
    shutil.rmtree(run / "checkpoint-2")
    save(run / "checkpoint-2", broken, tokenizer, 2)
    end(run)
    with pytest.raises(RunFailed, match="checkpoint-2"):
        command.main(["runs/tiny", "--follow", "--local_data", "data", "--tasks", "last_word"])
    assert (run / "evaluation/checkpoint-1/comparison.json").is_file()
    with pytest.raises(UserError):
        command.main(["runs/tiny", "--follow", "--local_data", "data", "--tasks", "hellswag"])


def test_a_suite_is_the_same_for_each_checkpoint() -> None:
    chosen = parse_options(["run", "--follow", "--suite", "quick"], description=None)
    first = override_arguments(EvaluationArguments(), chosen)
    assert override_arguments(EvaluationArguments(), chosen) == first


@pytest.mark.parametrize(("name", "device"), [("runs/tiny", "cpu"), ("s3://bucket/run", None)])
def test_the_gpu_of_the_training_is_left_alone(run, name: str, device: str | None, monkeypatch) -> None:
    used: list[Any] = []
    monkeypatch.setattr(command, "follow", lambda name, output, score, options: score("checkpoint", Path("scores")))
    monkeypatch.setattr(command, "_evaluate", lambda options, *_: used.append((options.device, options.baseline)))
    command.main([name, "--follow"])
    assert used == [(device, "none")]

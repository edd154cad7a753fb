"""evaluate.sh --follow scores each checkpoint of a run once, while the run writes and deletes them."""

import json
import shutil
from pathlib import Path
from typing import Any

import fsspec
import pytest
from safetensors.torch import load_file

from gpt2_repro.checkpoints import checkpoint, seal
from gpt2_repro.errors import RunFailed, UserError
from gpt2_repro.evaluation import __main__ as command
from gpt2_repro.evaluation import follow
from gpt2_repro.report.plots import figures
from gpt2_repro.report.read import Run, scores_of_checkpoints
from tests.evaluation.conftest import write_rows
from tests.training.test_copying import Objects


STATE = "rng_state_0.pth"  # a file that no model needs


class Ended(Exception):
    """The follower has seen all there is."""


@pytest.fixture
def run(model, tokenizer, tmp_path, monkeypatch) -> Path:
    """Return a running run with the checkpoints 1 and 2."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(follow.os, "nice", lambda more: more)

    def end(seconds: float) -> None:
        raise Ended

    monkeypatch.setattr(follow.time, "sleep", end)
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


def followed(name: Path | str, scores: Scores, output: Path | None = None) -> list[str]:
    """Follow until nothing is new, and return the names of the scored folders."""
    before = len(scores.names)
    try:
        follow.follow(str(name), output, scores)
    except Ended:
        scores.names.append("waits")
    return scores.names[before:]


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
    (run / "run_status.json").write_text('{"state": "complete"}', encoding="utf-8")
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
    assert followed(run, Scores()) == ["checkpoint-1", "waits"]


def test_checkpoint_with_damaged_weights_is_not_scored(run) -> None:
    with (run / "checkpoint-2/model.safetensors").open("r+b") as file:
        file.write(b"damage")
    assert followed(run, Scores()) == ["checkpoint-1", "waits"]


def test_model_that_cannot_be_scored_is_not_tried_again(run) -> None:
    class Fails(Scores):
        def __call__(self, one: checkpoint.Checkpoint, folder: Path) -> None:
            super().__call__(one, folder)
            raise RunFailed("a log-probability is not finite")

    assert followed(run, Fails()) == ["checkpoint-2", "waits"]


def test_copies_at_a_place_are_followed_with_their_log(run, tmp_path) -> None:
    fsspec.register_implementation("objects", Objects, clobber=True)
    name, mirror = f"objects://{tmp_path.name}/run", Path("evaluations", f"objects-{tmp_path.name}-run")
    try:
        with pytest.raises(UserError):
            followed(name, Scores())
        assert not mirror.exists()
        fsspec.filesystem("objects").put(str(run), name, recursive=True)
        assert followed(name, Scores()) == ["checkpoint-2", "checkpoint-1", "waits"]
        assert (mirror / "environment.json").read_bytes() == (run / "environment.json").read_bytes()
        assert followed(name, Scores()) == ["waits"]
    finally:
        Objects.store.clear()


def test_scores_of_another_run_are_kept(run) -> None:
    assert followed(run, Scores(), Path("scores")) == ["checkpoint-2", "checkpoint-1", "waits"]
    with (run / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 2, "time": 2.5}\n')
    assert followed(run, Scores(), Path("scores")) == ["waits"]
    (run / "metrics.jsonl").write_text('{"step": 1, "time": 9.5}\n', encoding="utf-8")  # of a run that began later
    with pytest.raises(UserError):
        followed(run, Scores(), Path("scores"))


def test_only_one_process_writes_to_a_folder(run) -> None:
    with follow._locked(run / "evaluation"), pytest.raises(UserError):
        followed(run, Scores())
    with pytest.raises(UserError):
        followed("runs/other", Scores())


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


@pytest.mark.parametrize(("name", "device"), [("runs/tiny", "cpu"), ("s3://bucket/run", None)])
def test_the_gpu_of_the_training_is_left_alone(run, name: str, device: str | None, monkeypatch) -> None:
    used: list[Any] = []
    monkeypatch.setattr(command, "follow", lambda name, output, score: score("checkpoint", Path("scores")))
    monkeypatch.setattr(command, "_evaluate", lambda options, *_: used.append((options.device, options.baseline)))
    command.main([name, "--follow"])
    assert used == [(device, "none")]

"""The right checkpoint is found for a run directory, a model folder or a Hub id."""

import json
from pathlib import Path

import pytest

from gpt2_repro.checkpoints.manifest import seal
from gpt2_repro.errors import UserError
from gpt2_repro.model.checkpoint import resolve_checkpoint


@pytest.fixture
def run(tmp_path: Path) -> Path:
    run = tmp_path / "run"
    run.mkdir()
    (run / "recipe.yaml").write_text("data: {sequence_length: 128}\n", encoding="utf-8")
    (run / "environment.json").write_text('{"seed": 42}', encoding="utf-8")
    return run


def test_a_hub_id_is_a_checkpoint() -> None:
    hub = resolve_checkpoint("openai-community/gpt2")
    assert (hub.source, hub.run_directory, hub.record) == ("openai-community/gpt2", None, None)
    assert hub.window(1024) == 1024


def test_an_unfinished_run_is_its_newest_complete_checkpoint(run: Path) -> None:
    for step in (3, 5, 7):
        (run / f"checkpoint-{step}").mkdir()
        (run / f"checkpoint-{step}" / "config.json").write_text("{}", encoding="utf-8")
        if step < 7:
            seal(run / f"checkpoint-{step}", {})
    assert resolve_checkpoint(str(run), unfinished=True) == resolve_checkpoint(str(run / "checkpoint-5"))
    with pytest.raises(UserError, match="checkpoint-5"):
        resolve_checkpoint(str(run))


def saved(run: Path, name: str, step: int) -> None:
    folder = run / name
    folder.mkdir()
    (folder / "config.json").write_text("{}", encoding="utf-8")
    seal(folder, {}, step=step)


@pytest.mark.parametrize(
    ("steps", "state", "reached", "newest"),
    [
        ((10, 20), "complete", 20, "final"),
        ((10, 20), "running", 20, "final"),  # killed after it wrote final/, or extended without a save
        ((10,), "complete", 20, "final"),
        ((), "stopped", 25, "final"),
        ((20, 30), "stopped", 30, "checkpoint-30"),
        ((20, 30), "running", 25, "checkpoint-30"),
        ((10, 15), "stopped", 15, "checkpoint-15"),  # the run went back (--resume_from) and was stopped
        ((10, 15), "complete", 15, "final"),
        ((20, 30), None, None, "checkpoint-30"),
    ],
)
def test_a_run_is_its_newest_weights(run: Path, steps: tuple[int, ...], state, reached, newest: str, caplog) -> None:
    saved(run, "final", 20)
    for step in steps:
        saved(run, f"checkpoint-{step}", step)
    (run / "checkpoint-40").mkdir()  # incomplete
    if state:
        (run / "run_status.json").write_text(json.dumps({"state": state, "step": reached}), encoding="utf-8")
    caplog.set_level("INFO")
    for unfinished in (True, False):
        assert resolve_checkpoint(str(run), unfinished=unfinished).source == str(run / newest)
    assert bool(caplog.messages) == (newest != "final")
    assert all(newest in message for message in caplog.messages)
    assert resolve_checkpoint(str(run / "final")).source == str(run / "final")


def test_a_checkpoint_belongs_to_its_run(run: Path) -> None:
    for name, facts in (("final", {"losses": {}, "environment": {"run_identity": {}}}), ("checkpoint-3", {})):
        (run / name).mkdir()
        (run / name / "config.json").write_text("{}", encoding="utf-8")
        seal(run / name, {}, step=3, tokens=1536, run_identity={"seed": 1}, **facts)
    training, final = (resolve_checkpoint(str(run / name)) for name in ("checkpoint-3", "final"))
    assert training.run_directory == final.run_directory == run
    assert training.source == str(run / "checkpoint-3") and training.record.environment.seed == 42
    assert final == resolve_checkpoint(str(run)) and final.tokens_trained == 1536 and final.window(1024) == 128
    (run / "final").rename(run.parent / "copied")
    elsewhere = resolve_checkpoint(str(run.parent / "copied"))
    assert (elsewhere.run_directory, elsewhere.tokens_trained) == (None, 1536)

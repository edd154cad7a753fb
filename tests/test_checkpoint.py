"""The right checkpoint is found for a run directory, a model folder or a Hub id."""

from pathlib import Path

import pytest

from gpt2_repro.checkpoints import seal
from gpt2_repro.checkpoints.checkpoint import resolve_checkpoint
from gpt2_repro.errors import UserError


@pytest.fixture
def run(tmp_path: Path) -> Path:
    run = tmp_path / "run"
    run.mkdir()
    (run / "recipe.yaml").write_text("data: {sequence_length: 128}\n", encoding="utf-8")
    (run / "environment.json").write_text('{"seed": 42}', encoding="utf-8")
    return run


def test_a_hub_id_is_a_checkpoint() -> None:
    hub = resolve_checkpoint("openai-community/gpt2")
    assert (hub.source, hub.run, hub.record) == ("openai-community/gpt2", None, None)
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


def test_a_checkpoint_belongs_to_its_run(run: Path) -> None:
    for name, facts in (("final", {"losses": {}, "environment": {"run_identity": {}}}), ("checkpoint-3", {})):
        (run / name).mkdir()
        (run / name / "config.json").write_text("{}", encoding="utf-8")
        seal(run / name, {}, step=3, tokens=1536, run_identity={"seed": 1}, **facts)
    training, final = (resolve_checkpoint(str(run / name)) for name in ("checkpoint-3", "final"))
    assert training.run == final.run == run
    assert training.source == str(run / "checkpoint-3") and training.record.environment.seed == 42
    assert final == resolve_checkpoint(str(run)) and final.tokens_trained == 1536 and final.window(1024) == 128
    (run / "final").rename(run.parent / "copied")
    elsewhere = resolve_checkpoint(str(run.parent / "copied"))
    assert (elsewhere.run, elsewhere.tokens_trained) == (None, 1536)

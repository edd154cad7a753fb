"""Checkpoints are written, verified, found by name, and deleted in order of step."""

import json
import math
import os
from pathlib import Path

import pytest

from gpt2_repro.errors import UserError
from gpt2_repro.run_record import checkpoints
from gpt2_repro.run_record.checkpoints import (
    defect,
    discard,
    named,
    newest_complete,
    publish,
    read_manifest,
    seal,
    training_record,
)
from gpt2_repro.run_record.events import append
from gpt2_repro.training.resuming import refuse_code


TRAJECTORY = {"seed": 1, "max_steps": 10}


@pytest.fixture
def save(tmp_path: Path):
    def run(step: int, eval_loss: float | None = None, **facts: object) -> Path:
        staged = tmp_path / "staging" / f"checkpoint-{step}"
        (staged / f"global_step{step}").mkdir(parents=True)
        (staged / "model.safetensors").write_bytes(b"weights" * step)
        (staged / f"global_step{step}" / "optimizer.pt").write_bytes(b"moments" * step)
        seal(staged, {}, run_identity=TRAJECTORY, **facts)
        append(tmp_path / "metrics.jsonl", {"step": step, "eval_loss": eval_loss} if eval_loss else {"step": step})
        publish(staged, tmp_path / f"checkpoint-{step}")
        return tmp_path / f"checkpoint-{step}"

    return run


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {"staging", "metrics.jsonl"}


def test_manifest_records_run_identity_and_files(save) -> None:
    save(5).joinpath("left").write_text("from a damaged save, which the next save replaces", encoding="utf-8")
    checkpoint = save(5, 3.0)
    manifest = read_manifest(checkpoint)
    assert manifest["run_identity"] == TRAJECTORY
    assert manifest["files"].keys() == {"model.safetensors", "global_step5/optimizer.pt"}
    assert checkpoints.size(checkpoint) == 7 * 5 * 2
    assert defect(checkpoint, read_files=True) is None and names(checkpoint.parent) == {"checkpoint-5"}
    assert training_record(checkpoint) is None  # the run has no environment.json
    # The record is read from the checkpoint, not from the run directory, and only if it is intact.
    (checkpoint.parent / "environment.json").write_text('{"seed": 1}', encoding="utf-8")
    record = training_record(checkpoint)
    assert record.environment.run_identity == TRAJECTORY and record.losses == {"eval_loss": 3.0}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest | {"run_identity": {"seed": 2}}), encoding="utf-8")
    assert training_record(checkpoint) is None


def flip(checkpoint: Path) -> None:
    path = checkpoint / "global_step300" / "optimizer.pt"
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])


def change(**values: object):
    return lambda its: (its / "manifest.json").write_text(json.dumps(read_manifest(its) | values), encoding="utf-8")


DAMAGES = {
    "lost state": lambda its: (its / "global_step300" / "optimizer.pt").unlink(),
    "cut weights": lambda its: (its / "model.safetensors").write_bytes(b"w"),
    "flipped bit": flip,
    "lost manifest": lambda its: (its / "manifest.json").unlink(),
    "cut manifest": lambda its: (its / "manifest.json").write_text(
        (its / "manifest.json").read_text(encoding="utf-8")[:50], encoding="utf-8"
    ),
    "empty blocks": lambda its: (its / "manifest.json").write_bytes(b"\0" * 200),
    "another run's": change(run_identity={}),
    "no files": change(files=[], sha256=""),
    "a plain file": lambda its: (discard(its), its.write_text("x", encoding="utf-8")),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_newest_complete_checkpoint_is_chosen_and_damaged_ones_are_reported(save, damage, tmp_path: Path) -> None:
    save(9)
    good, bad = save(100), save(300)
    damage(bad)
    for left in ("checkpoint-400.partial", "checkpoint-400-tmp", "tmp-checkpoint-400"):
        (tmp_path / left).mkdir()
    chosen, skipped = newest_complete(tmp_path)
    assert chosen == good and len(skipped) == 1 and str(bad) in skipped[0]
    if damage is not flip:  # only a hash reveals a flipped bit, and rotation does not compute hashes
        checkpoints.rotate(tmp_path, keep=1, keep_best=True)  # damaged checkpoints are neither counted nor deleted
    checkpoints.set_aside(tmp_path, after=100)
    save(300)
    checkpoints.set_aside(tmp_path, after=100)  # the second call keeps the checkpoint that was set aside first
    names_aside = {"abandoned-checkpoint-300", "abandoned-abandoned-checkpoint-300"}
    assert names(tmp_path) >= {"checkpoint-100", *names_aside}
    assert newest_complete(tmp_path) == (good, []) and newest_complete(tmp_path / "nothing") == (None, [])


def test_nfs_files_are_ignored_and_hashes_are_computed_while_writing(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint-3"
    checkpoint.mkdir()
    (checkpoint / ".nfs000000000001").write_text("deleted, but open", encoding="utf-8")
    seal(checkpoint, {})
    assert read_manifest(checkpoint)["files"] == {} and defect(checkpoint, read_files=True) is None
    refuse_code(checkpoint, [])
    (checkpoint / "manifest.json").unlink()
    (checkpoint / "shard.pt").write_bytes(b"damaged while written to")
    seal(checkpoint, {"shard.pt": {"bytes": 24, "sha256": "0" * 64}})
    assert defect(checkpoint, read_files=False) is None and "shard.pt" in defect(checkpoint, read_files=True)


def test_rotation_goes_by_step_and_keeps_best_and_periodic_checkpoints(save, tmp_path: Path) -> None:
    losses = {1250: 3.3, 250: 3.5, 400: None, 500: 3.1, 750: math.nan, 1000: 3.2, 1100: None}
    for step, loss in losses.items():
        os.utime(save(step, loss), (5000 - step, 5000 - step))  # the newest step has the oldest file time
    for options, kept in (
        ({"keep": 0}, losses.keys()),
        ({"keep": 1, "keep_every": 250, "keep_best": True}, {250, 500, 750, 1000, 1250}),
        ({"keep": 1, "keep_every": 1000, "keep_best": True}, {500, 1000, 1250}),
        ({"keep": 2}, {1000, 1250}),
        ({"keep": 1}, {1250}),
    ):
        checkpoints.rotate(tmp_path, **options)
        assert names(tmp_path) == {f"checkpoint-{step}" for step in kept}


def test_rotation_keeps_only_the_newest_rolling_checkpoint(save, tmp_path: Path) -> None:
    for step in (100, 200, 300):
        save(step)
    save(310, rolling=True)
    save(320, rolling=True)
    for newer, keep, kept in ((None, 2, {200, 300, 320}), (400, 2, {300, 400}), (None, 1, {400})):
        if newer:
            save(newer)
        checkpoints.rotate(tmp_path, keep=keep)
        assert names(tmp_path) == {f"checkpoint-{step}" for step in kept}
    save(410, 3.0, rolling=True)
    save(420, rolling=True)
    checkpoints.rotate(tmp_path, keep=0, keep_best=True)
    assert names(tmp_path) == {"checkpoint-400", "checkpoint-410", "checkpoint-420"}


def test_named_checkpoint_must_be_complete_and_in_the_run(save, tmp_path: Path) -> None:
    save(1000)
    for name in ("checkpoint-1000", str(tmp_path / "checkpoint-1000")):
        assert named(tmp_path, name) == tmp_path / "checkpoint-1000"
    (save(1100) / "model.safetensors").unlink()
    (tmp_path / "other").mkdir()
    for name in ("checkpoint-8", "final", str(tmp_path / "other" / "checkpoint-1000"), "other/checkpoint-1000"):
        with pytest.raises(UserError, match="checkpoint-1000.*--init_from"):
            named(tmp_path, name)
    with pytest.raises(UserError, match="checkpoint-1100 .*model.safetensors"):
        named(tmp_path, "checkpoint-1100")

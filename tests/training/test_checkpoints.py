"""Checkpoints are written, verified, found by name, and deleted in order of step."""

import json
import math
import os
import shutil
from pathlib import Path

import pytest
import torch

from gpt2_repro.checkpoints.manifest import checkpoint_size, defect, read_manifest, seal, training_record
from gpt2_repro.checkpoints.resuming import refuse_code
from gpt2_repro.checkpoints.rotation import newest_complete, rotate, set_aside
from gpt2_repro.run_record.events import append
from gpt2_repro.run_record.layout import Rotation


def steps(run: Path) -> set[int]:
    return {int(path.name.removeprefix("checkpoint-")) for path in run.glob("checkpoint-*")}


def test_manifest_records_run_identity_and_files(save) -> None:
    save(5).joinpath("left").write_text("from a damaged save, which the next save replaces", encoding="utf-8")
    checkpoint = save(5, {"optimizer": {}, "global_step5/states": {"m": torch.ones(5)}})
    manifest = read_manifest(checkpoint)
    assert manifest["files"].keys() == {"optimizer.pt", "global_step5/states.pt"} and steps(checkpoint.parent) == {5}
    assert checkpoint_size(checkpoint) == sum(path.stat().st_size for path in checkpoint.rglob("*.pt"))
    # The record is read from the checkpoint, not from the run directory, and only if it is intact.
    (checkpoint.parent / "environment.json").write_text('{"seed": 1}', encoding="utf-8")
    append(checkpoint.parent / "metrics.jsonl", {"step": 5, "eval_loss": 3.0})
    record = training_record(checkpoint)
    assert record.environment.run_identity == manifest["run_identity"] and record.losses == {"eval_loss": 3.0}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest | {"run_identity": {"seed": 2}}), encoding="utf-8")
    assert training_record(checkpoint) is None


def flip(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1]))


DAMAGES = {
    "lost state": lambda its: (its / "optimizer.pt").unlink(),
    "cut state": lambda its: os.truncate(its / "optimizer.pt", 50),
    "flipped bit": lambda its: flip(its / "optimizer.pt"),
    "lost manifest": lambda its: (its / "manifest.json").unlink(),
    "cut manifest": lambda its: os.truncate(its / "manifest.json", 50),
    "a plain file": lambda its: (shutil.rmtree(its), its.write_text("x", encoding="utf-8")),
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
    if damage is not DAMAGES["flipped bit"]:  # only a hash reveals a flipped bit, and rotation does not compute hashes
        # Damaged checkpoints are neither counted nor deleted.
        rotate(tmp_path, Rotation(1, keep_best=True))
    set_aside(tmp_path, after=100)
    save(300)
    set_aside(tmp_path, after=100)  # the second call keeps the checkpoint that was set aside first
    aside = {path.name for path in tmp_path.glob("abandoned-*")}
    assert aside == {"abandoned-checkpoint-300", "abandoned-abandoned-checkpoint-300"}
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
        os.utime(save(step), (5000 - step, 5000 - step))  # the newest step has the oldest file time
        append(tmp_path / "metrics.jsonl", {"step": step, "eval_loss": loss})
    for rotation, kept in (
        (Rotation(0), losses.keys()),
        (Rotation(1, 250, keep_best=True), {250, 500, 750, 1000, 1250}),
        (Rotation(1, 1000, keep_best=True), {500, 1000, 1250}),
        (Rotation(2), {1000, 1250}),
        (Rotation(1), {1250}),
    ):
        rotate(tmp_path, rotation)
        assert steps(tmp_path) == set(kept)


def test_the_best_checkpoint_of_a_run_with_an_average_has_the_best_average(save, tmp_path: Path) -> None:
    """The average is what an evaluation of the checkpoint loads."""
    losses: dict[int, dict[str, float | None]] = {
        1: {"eval_loss": 3.4},  # no update so far
        2: {"eval_loss": 3.1, "eval_EMA_loss": 3.3},
        3: {"eval_loss": 3.2, "eval_EMA_loss": 3.0},
        4: {"eval_loss": 3.0, "eval_EMA_loss": None},
        5: {"eval_loss": 3.3, "eval_EMA_loss": 3.2},
    }
    for step, values in losses.items():
        save(step)
        append(tmp_path / "metrics.jsonl", {"step": step, **values})
    rotate(tmp_path, Rotation(1, keep_best=True))
    assert steps(tmp_path) == {3, 5}


def test_rotation_keeps_only_the_newest_rolling_checkpoint(save, tmp_path: Path) -> None:
    append(tmp_path / "metrics.jsonl", {"step": 410, "eval_loss": 3.0})
    for lasting, rolling, rotation, kept in (
        ((100, 200, 300), (310, 320), Rotation(2), {200, 300, 320}),
        ((400,), (), Rotation(2), {300, 400}),
        ((), (), Rotation(1), {400}),
        ((), (410, 420), Rotation(0, keep_best=True), {400, 410, 420}),
    ):
        for step in (*lasting, *rolling):
            save(step, rolling=step in rolling)
        rotate(tmp_path, rotation)
        assert steps(tmp_path) == kept

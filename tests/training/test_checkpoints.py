"""A checkpoint is complete or it does not count; which ones stay is a matter of steps, not of clocks."""

import json
import math
import os
from pathlib import Path

import pytest

from gpt2_repro.checkpoint import training_record
from gpt2_repro.errors import UserError
from gpt2_repro.training import checkpoints
from gpt2_repro.training.checkpoints import (
    defect,
    discard,
    named,
    newest_complete,
    publish,
    read_manifest,
    rotate,
    seal,
    set_aside,
    sweep,
)
from gpt2_repro.training.resuming import refuse_code


TRAJECTORY = {"seed": 1, "max_steps": 10}


@pytest.fixture
def save(tmp_path: Path):
    def run(step: int, eval_loss: float | None = None) -> Path:
        staged = tmp_path / "staging" / f"checkpoint-{step}"
        (staged / f"global_step{step}").mkdir(parents=True)
        (staged / "model.safetensors").write_bytes(b"weights" * step)
        (staged / f"global_step{step}" / "optimizer.pt").write_bytes(b"moments" * step)
        seal(staged, {}, trajectory=TRAJECTORY, eval_loss=eval_loss)
        publish(staged, tmp_path / f"checkpoint-{step}")
        return tmp_path / f"checkpoint-{step}"

    return run


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {"staging"}


def test_the_newest_complete_one_is_chosen_and_newer_ones_are_named(save, tmp_path: Path) -> None:
    save(9)
    good, cut, flipped, empty = save(100), save(200), save(300), tmp_path / "checkpoint-400"
    (cut / "model.safetensors").write_bytes(b"w")
    content = bytearray((flipped / "global_step300" / "optimizer.pt").read_bytes())
    content[5] ^= 1
    (flipped / "global_step300" / "optimizer.pt").write_bytes(content)
    empty.mkdir()
    (tmp_path / "checkpoint-500.partial").mkdir()
    chosen, skipped = newest_complete(tmp_path)
    assert chosen == good
    assert [line.split(": ")[1] for line in skipped] == [
        "it has no manifest",
        "global_step300/optimizer.pt is damaged",
        "model.safetensors is missing or cut short",
    ]


@pytest.mark.parametrize("lost", ["model.safetensors", "global_step7/optimizer.pt", "manifest.json"])
def test_a_checkpoint_without_one_of_its_files_does_not_count(save, lost: str, tmp_path: Path) -> None:
    (save(7) / lost).unlink()
    assert newest_complete(tmp_path)[0] is None


def test_a_manifest_that_was_cut_short_does_not_count(save) -> None:
    checkpoint = save(3)
    manifest = checkpoint / "manifest.json"
    manifest.write_text(manifest.read_text()[:50])
    assert defect(checkpoint, read_files=False) == "its manifest cannot be read"


@pytest.mark.parametrize("change", ["tokens", "files", "list", "folder", "plain file", "zeros"])
def test_a_damaged_manifest_is_skipped(save, tmp_path: Path, change: str) -> None:
    good, checkpoint = save(2), save(3)
    manifest = read_manifest(checkpoint)
    (checkpoint / "manifest.json").unlink()
    if change == "plain file":
        discard(checkpoint)
        checkpoint.write_text("x")
    elif change == "folder":
        (checkpoint / "manifest.json").mkdir()
    elif change == "zeros":
        (checkpoint / "manifest.json").write_bytes(b"\0" * 200)
    else:
        changed = {"tokens": {"trajectory": {}}, "files": {"files": []}, "list": {"files": [], "sha256": ""}}[change]
        (checkpoint / "manifest.json").write_text(json.dumps(manifest | changed))
    chosen, skipped = newest_complete(tmp_path)
    assert chosen == good and len(skipped) == 1
    rotate(tmp_path, keep=1, keep_best=True)
    set_aside(tmp_path, after=2)
    assert names(tmp_path) == {"checkpoint-2", "abandoned-checkpoint-3"}


def test_a_changed_record_is_not_shown(save) -> None:
    checkpoint = save(3)
    (checkpoint.parent / "environment.json").write_text('{"plan": {}}')
    assert training_record(checkpoint)["trajectory"] == TRAJECTORY
    manifest = read_manifest(checkpoint)
    (checkpoint / "manifest.json").write_text(json.dumps(manifest | {"tokens": 5}))
    assert training_record(checkpoint) == {}


def test_files_that_nfs_keeps_open_do_not_count(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint-3"
    checkpoint.mkdir()
    (checkpoint / ".nfs000000000001").write_text("deleted, but open")
    seal(checkpoint, {})
    assert read_manifest(checkpoint)["files"] == {} and defect(checkpoint, read_files=True) is None
    refuse_code(checkpoint, [])


def test_no_run_has_no_checkpoint(tmp_path: Path) -> None:
    assert newest_complete(tmp_path / "nothing") == (None, [])


def test_a_damaged_one_makes_room_for_its_name(save, tmp_path: Path) -> None:
    old = tmp_path / "checkpoint-5"
    old.mkdir()
    (old / "half").write_text("x")
    assert defect(save(5), read_files=True) is None
    assert names(tmp_path) == {"checkpoint-5"}


def test_a_hash_taken_while_writing_is_kept_and_counts(tmp_path: Path) -> None:
    staged = tmp_path / "staging" / "checkpoint-1"
    staged.mkdir(parents=True)
    (staged / "shard.pt").write_bytes(b"what the disk made of it")
    seal(staged, {"shard.pt": {"bytes": 24, "sha256": "0" * 64}}, trajectory=TRAJECTORY)
    assert defect(staged, read_files=False) is None
    assert defect(staged, read_files=True) == "shard.pt is damaged"


def test_rotation_counts_complete_ones_by_step(save, tmp_path: Path) -> None:
    for step in (1000, 9, 20, 100):  # 100 is the newest by its time on the disk
        os.utime(save(step), (step, step))
    (tmp_path / "checkpoint-2000").mkdir()  # incomplete: neither counted nor deleted
    rotate(tmp_path, keep=0)
    assert len(list(tmp_path.glob("checkpoint-*"))) == 5
    rotate(tmp_path, keep=2)
    assert names(tmp_path) == {"checkpoint-100", "checkpoint-1000", "checkpoint-2000"}


@pytest.mark.parametrize("left", ["checkpoint-200.partial", "checkpoint-200-tmp", "tmp-checkpoint-200", "staging"])
def test_what_else_lies_there_never_costs_the_good_one(save, left: str, tmp_path: Path) -> None:
    save(100)
    (tmp_path / left).mkdir(exist_ok=True)
    rotate(tmp_path, keep=1)
    assert newest_complete(tmp_path)[0] == tmp_path / "checkpoint-100"


def test_rotation_keeps_the_best_and_every_so_many_steps(save, tmp_path: Path) -> None:
    losses = {250: 3.5, 400: None, 500: 3.1, 750: math.nan, 1000: 3.2, 1100: None, 1250: 3.3}
    for step, loss in losses.items():
        save(step, loss)
    rotate(tmp_path, keep=1, keep_every=250, keep_best=True)
    assert names(tmp_path) == {f"checkpoint-{step}" for step in (250, 500, 750, 1000, 1250)}
    rotate(tmp_path, keep=1, keep_every=1000, keep_best=True)
    assert names(tmp_path) == {"checkpoint-500", "checkpoint-1000", "checkpoint-1250"}
    rotate(tmp_path, keep=1, keep_best=False)
    assert names(tmp_path) == {"checkpoint-1250"}


def test_what_kills_leave_behind_is_swept(save, tmp_path: Path) -> None:
    save(3)
    (tmp_path / "trash-checkpoint-7" / "left").mkdir(parents=True)
    (tmp_path / "staging" / "checkpoint-4").mkdir()
    sweep(tmp_path)
    assert names(tmp_path) == {"checkpoint-3"} and not (tmp_path / "staging").exists()


def test_a_kill_while_deleting_leaves_no_half_checkpoint(save, tmp_path: Path, monkeypatch) -> None:
    checkpoint = save(3)
    seen = []
    monkeypatch.setattr(checkpoints.shutil, "rmtree", lambda path, **_: seen.append((path.name, names(tmp_path))))
    discard(checkpoint)
    assert seen[-1] == ("trash-checkpoint-3", {"trash-checkpoint-3"})


def test_going_back_names_a_checkpoint_of_the_run_and_sets_newer_ones_aside(save, tmp_path: Path) -> None:
    for step in (1000, 1100, 2000):
        save(step)
    for name in ("checkpoint-1000", str(tmp_path / "checkpoint-1000")):
        assert named(tmp_path, name) == tmp_path / "checkpoint-1000"
    assert [path.name for path in set_aside(tmp_path, after=1000)] == [
        "abandoned-checkpoint-2000",
        "abandoned-checkpoint-1100",
    ]
    assert newest_complete(tmp_path)[0] == tmp_path / "checkpoint-1000"
    save(1100)
    set_aside(tmp_path, after=1000)  # once more: what was set aside before stays
    assert {"abandoned-checkpoint-1100", "abandoned-abandoned-checkpoint-1100"} <= names(tmp_path)


def test_a_checkpoint_that_is_not_the_runs_own_is_refused(save, tmp_path: Path) -> None:
    (save(7) / "model.safetensors").unlink()
    save(5)
    (tmp_path / "other").mkdir()
    for name in ("checkpoint-8", "final", str(tmp_path / "other" / "checkpoint-5"), "other/checkpoint-5"):
        with pytest.raises(UserError, match=r"has no checkpoint .*\(checkpoint-5\).*--init_from"):
            named(tmp_path, name)
    with pytest.raises(UserError, match="checkpoint-7 is not complete .model.safetensors is missing"):
        named(tmp_path, "checkpoint-7")


def test_a_checkpoint_says_which_run_it_belongs_to_and_what_it_holds(save) -> None:
    checkpoint = save(5, 3.0)
    manifest = read_manifest(checkpoint)
    assert (manifest["trajectory"], manifest["eval_loss"]) == (TRAJECTORY, 3.0)
    assert json.loads((checkpoint / "manifest.json").read_text())["files"].keys() == {
        "model.safetensors",
        "global_step5/optimizer.pt",
    }
    assert checkpoints.size(checkpoint) == 7 * 5 * 2

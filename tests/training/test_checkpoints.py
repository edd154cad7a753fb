"""A checkpoint is complete or it does not count."""

import json
from pathlib import Path

import pytest

from gpt2_repro.training.checkpoints import defect, newest_complete, publish, read_trajectory, rotate, seal


TRAJECTORY = {"seed": 1, "max_steps": 10}


@pytest.fixture
def save(tmp_path: Path):
    def run(step: int) -> Path:
        staged = tmp_path / "staging" / f"checkpoint-{step}"
        (staged / f"global_step{step}").mkdir(parents=True)
        (staged / "model.safetensors").write_bytes(b"weights" * step)
        (staged / f"global_step{step}" / "optimizer.pt").write_bytes(b"moments" * step)
        seal(staged, trajectory=TRAJECTORY)
        publish(staged, tmp_path / f"checkpoint-{step}")
        return tmp_path / f"checkpoint-{step}"

    return run


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


def test_no_run_has_no_checkpoint(tmp_path: Path) -> None:
    assert newest_complete(tmp_path / "nothing") == (None, [])


def test_an_incomplete_one_steps_aside_for_its_name(save, tmp_path: Path) -> None:
    old = tmp_path / "checkpoint-5"
    old.mkdir()
    (old / "half").write_text("x")
    assert defect(save(5), read_files=True) is None
    assert (tmp_path / "incomplete-checkpoint-5" / "half").exists()


def test_rotation_counts_complete_ones_by_step(save, tmp_path: Path) -> None:
    for step in (1000, 9, 20, 100):
        save(step)
    (tmp_path / "checkpoint-2000").mkdir()
    (tmp_path / "trash-checkpoint-7" / "left").mkdir(parents=True)  # by a kill while deleting
    rotate(tmp_path, keep=0)
    assert len(list(tmp_path.glob("checkpoint-*"))) == 5
    rotate(tmp_path, keep=2)
    assert sorted(path.name for path in tmp_path.glob("*checkpoint-*")) == [
        "checkpoint-100",
        "checkpoint-1000",
        "checkpoint-2000",
    ]


def test_a_checkpoint_says_which_run_it_belongs_to_and_what_it_holds(save) -> None:
    checkpoint = save(5)
    assert read_trajectory(checkpoint) == TRAJECTORY
    assert json.loads((checkpoint / "manifest.json").read_text())["files"].keys() == {
        "model.safetensors",
        "global_step5/optimizer.pt",
    }

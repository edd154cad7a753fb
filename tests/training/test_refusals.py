"""A start that is refused changes nothing: no file of the run, and no file of others."""

import fcntl
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from gpt2_repro.checkpoints.manifest import checkpoint_size, manifest_hash
from gpt2_repro.errors import UserError
from gpt2_repro.run_record import RunRecord
from tests.training.test_machines import on_two_machines


FULL_DISK = "tests/training/full_disk_train.py"


def content(folder: Path) -> dict[str, bytes | None]:
    """Return the bytes of each file in a folder by path, and None for each folder. {}: there is no folder."""
    paths = [folder, *folder.rglob("*")] if folder.exists() else []
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in paths}


def prepare_nothing(run: Path) -> None:
    pass


def add_foreign_file(run: Path) -> None:
    (run / "checkpoint-8" / "foreign.pt").write_bytes(b"x")


def damage_all(run: Path) -> None:
    for checkpoint in run.glob("checkpoint-*"):
        (checkpoint / "model.safetensors").unlink()
    shutil.rmtree(run / "final")


def leave_unfinished_work(run: Path) -> None:
    """Add what killed starts leave, and remove the lock file."""
    for name in ("staging/checkpoint-9", "trash-checkpoint-2", ".restoring1"):
        (run / name).mkdir(parents=True)
        (run / name / "part").write_bytes(b"x")
    (run / ".lock").unlink()


# Options that are refused, and a function that changes the finished run before.
REFUSALS: dict[str, tuple[tuple[object, ...], Callable[[Path], None]]] = {
    "another run": (("--learning_rate", 5), prepare_nothing),
    "another precision": (("--bf16", "true"), prepare_nothing),
    "fewer steps": (("--max_steps", 2, "--warmup_steps", 1, "--allow_resume_change"), prepare_nothing),
    "a missing checkpoint": (("--resume_from", "checkpoint-3"), leave_unfinished_work),
    "a foreign file": (("--resume_from", "checkpoint-8"), add_foreign_file),
    "damaged checkpoints": ((), damage_all),
    "a place of others": (("--sync_to", "{others}", "--resume_from", "checkpoint-4"), leave_unfinished_work),
    "copies of another run": (("--sync_from", "{copies}", "--resume_from", "checkpoint-4"), leave_unfinished_work),
    "a place inside the run": (("--sync_to", "{run}/place", "--resume_from", "checkpoint-4"), prepare_nothing),
    "an unknown service": (("--report_to", "nothing", "--resume_from", "checkpoint-4"), leave_unfinished_work),
}


@pytest.mark.parametrize(("options", "prepare"), REFUSALS.values(), ids=REFUSALS)
def test_a_refused_start_changes_no_byte(options, prepare, finished: Path, typed, tmp_path: Path) -> None:
    prepare(finished)
    others = tmp_path / "others"
    others.mkdir()
    (others / "thesis.txt").write_text("of somebody else", encoding="utf-8")
    copies = Path(shutil.copytree(finished, tmp_path / "copies"))
    change_identity(copies)
    folders = {"run": finished, "others": others, "copies": copies}
    before = {name: content(folder) for name, folder in folders.items()}
    words = [str(option).format(**folders) for option in options]
    done = typed(finished, *words)
    assert done.returncode == 2, done.stdout + done.stderr
    assert {name: content(folder) for name, folder in folders.items()} == before


def change_identity(run: Path) -> None:
    """Give a run and its checkpoints another seed, and add a newer checkpoint."""
    if (run / "checkpoint-8" / "model.safetensors").is_file():
        shutil.copytree(run / "checkpoint-8", run / "checkpoint-9")
    paths = [*run.glob("checkpoint-*/manifest.json"), run / "environment.json"]
    for path in paths:
        document = json.loads(path.read_text(encoding="utf-8"))
        document["run_identity"]["seed"] = 99
        document |= {"sha256": manifest_hash(document)}
        path.write_text(json.dumps(document), encoding="utf-8")


def test_a_full_disk_is_refused_before_the_run_goes_back(finished: Path, type_warm, tiny_recipe: Path) -> None:
    leave_unfinished_work(finished)
    before = content(finished)
    words = ("--output_dir", finished, "--resume_from", "checkpoint-4", "--report_to", "none")
    done = type_warm("python", FULL_DISK, tiny_recipe, *words, FREE="1000")
    assert done.returncode == 2, done.stdout + done.stderr
    assert content(finished) == before


@pytest.mark.parametrize("options", [(), ("--sync_to", "{others}")], ids=["full disk", "a place of others"])
def test_a_refused_start_creates_no_folder(options, type_warm, tiny_recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "thesis.txt").write_text("of somebody else", encoding="utf-8")
    before = content(tmp_path)
    words = [option.format(others=tmp_path / "others") for option in options]
    run = tmp_path / "new" / "runs" / "one"
    done = type_warm("python", FULL_DISK, tiny_recipe, "--output_dir", run, *words, FREE="1000")
    assert done.returncode == 2, done.stdout + done.stderr
    assert content(tmp_path) == before


def test_space_that_old_files_occupy_counts_as_free(finished: Path, type_warm, tiny_recipe: Path) -> None:
    """A start is not refused for lack of space if the first save deletes enough."""
    (finished / "staging").mkdir()
    (finished / "staging" / "part").write_bytes(bytes(3 * checkpoint_size(finished / "checkpoint-8")))
    words = ("--output_dir", finished, "--resume_from", "checkpoint-4", "--stop_at_step", 4)
    done = type_warm("python", FULL_DISK, tiny_recipe, *words, FREE="1000")
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (finished / "staging").exists()


def test_a_second_job_changes_nothing(finished: Path, typed) -> None:
    with (finished / ".lock").open("a+", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write(" on another machine")
        lock.flush()
        before = content(finished)
        done = typed(finished, "--resume_from", "checkpoint-4")
        assert done.returncode == 2 and content(finished) == before


def test_a_lock_is_undone_until_the_run_is_claimed(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "one"
    run = RunRecord(path)
    with pytest.raises(UserError), run.unchanged_until_claimed():
        run.lock()
        assert (path / ".lock").read_bytes()
        raise UserError("refused")
    assert content(tmp_path) == {".": None}
    with pytest.raises(UserError), run.unchanged_until_claimed():
        run.claim("training: {}")
        raise UserError("failed later")
    assert run.status().state == "running" and (path / ".lock").read_bytes()
    before = content(path)
    run.lock()  # the same process may train the run again
    other = RunRecord(path)
    with pytest.raises(UserError), other.unchanged_until_claimed():
        other.lock()
    assert content(path) == before
    run.unlock()
    with pytest.raises(UserError), other.unchanged_until_claimed():
        other.lock()
        raise UserError("refused")
    assert content(path) == before


@pytest.mark.faults
def test_a_conversion_without_space_is_refused(train, type_warm, tiny_recipe: Path, tmp_path: Path) -> None:
    rows = ("--per_device_train_batch_size", 4)
    run = train(tmp_path / "run", *rows, "--stop_at_step", 4, launcher=("launch", 2))
    before = content(run)
    free = int(1.17 * checkpoint_size(run / "checkpoint-4"))  # enough for a save
    words = ("--output_dir", run, *rows)
    done = type_warm("launch", 1, FULL_DISK, tiny_recipe, *words, FREE=str(free))
    assert done.returncode != 0 and "Converting" in done.stderr
    assert content(run) == before


@pytest.mark.faults
def test_all_machines_get_the_error_of_a_conversion(train, tiny_recipe: Path, tmp_path: Path) -> None:
    rows = ("--per_device_train_batch_size", 4)
    run = train(tmp_path / "run", *rows, "--stop_at_step", 4, launcher=("launch", 1))
    before = content(run)
    free = int(1.17 * checkpoint_size(run / "checkpoint-4"))
    codes = on_two_machines(tiny_recipe, run, tmp_path, *rows, script=FULL_DISK, FREE=str(free))
    logs = [(tmp_path / f"log{rank}").read_text(encoding="utf-8") for rank in (0, 1)]
    assert 0 not in codes and all("Converting" in log for log in logs)
    assert content(run) == before


@pytest.mark.faults
@pytest.mark.parametrize("is_new", [True, False])
def test_machines_without_a_shared_disk_change_nothing(is_new: bool, train, tiny_recipe, tmp_path: Path) -> None:
    rows = ("--per_device_train_batch_size", 4)
    folders = [tmp_path / "first", tmp_path / "second"]
    if not is_new:
        for folder in folders:
            train(folder, *rows, "--stop_at_step", 4, launcher=("launch", 2))
    before = [content(folder) for folder in folders]
    codes = on_two_machines(tiny_recipe, folders[0], tmp_path, *rows, second=("--output_dir", folders[1]))
    assert 0 not in codes
    assert [content(folder) for folder in folders] == before

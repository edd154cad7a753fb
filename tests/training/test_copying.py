"""A run is copied to another place while it trains, and restored on an empty machine."""

import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from huggingface_hub import HfApi, HfFileSystem

from gpt2_repro.checkpoints import copying, restoring
from gpt2_repro.checkpoints.manifest import defect, manifest_hash, read_manifest, seal
from gpt2_repro.checkpoints.place import Place, absolute
from gpt2_repro.checkpoints.resuming import RunIdentity
from gpt2_repro.checkpoints.rotation import discard, newest_complete, newest_step, publish, rotate, set_aside
from gpt2_repro.errors import RunFailed, UserError
from gpt2_repro.run_record import RunRecord
from gpt2_repro.run_record.layout import Rotation


KEEP_TWO = Rotation(keep=2)


@pytest.fixture(params=["folder", "objects"])
def place(request, tmp_path: Path) -> Iterator[str]:
    """Return the name of an empty place: a folder, or an object store in memory.

    Its name has characters that fsspec's `rm` would expand to the name of another run, `place1`.
    """
    if request.param == "folder":
        yield str(tmp_path / "place[1]")
    else:
        fsspec.register_implementation("objects", Objects, clobber=True)
        yield f"objects://{tmp_path.name}/place[1]"
        Objects.store.clear()


class Objects(MemoryFileSystem):
    """An object store that the program does not know as a memory of this process."""

    protocol = "objects"
    store: ClassVar[dict[str, Any]] = {}

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.replace("objects://", "memory://"))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


def save(run: Path, step: int, **facts: Any) -> None:
    """Add a complete checkpoint to a run, and an event to its log."""
    folder = run / f"checkpoint-{step}"
    (folder / "shards").mkdir(parents=True)
    (folder / "shards" / "weights.bin").write_bytes(str(step).encode() * 1000)
    (folder / "config.json").write_text("{}", encoding="utf-8")
    seal(folder, {}, run_identity={"seed": 1}, **facts)
    (run / "run_status.json").write_text('{"state": "running"}', encoding="utf-8")
    (run / "environment.json").write_text('{"run_identity": {"seed": 1}}', encoding="utf-8")
    with (run / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"step": step, "eval_loss": abs(step - 4)}) + "\n")


def copy(run: Path, step: int, place: str, seed: int = 1, **rules: Any) -> float:
    rotation, identity = KEEP_TWO._replace(**rules), RunIdentity({"seed": seed})
    return copying.copy(Place(place), str(run), f"checkpoint-{step}", rotation, identity)


def save_and_copy(run: Path, place: str, *steps: int, **rules: Any) -> None:
    for step in steps:
        save(run, step)
        copy(run, step, place, **rules)


def files_at(place: str) -> dict[str, bytes]:
    """Return the content of all files at a place, by path."""
    target = Place(place)
    return {path: target.fs.cat_file(path) for path in target.fs.find(target.root)}


def steps_at(place: str) -> list[int]:
    return [step for step, manifest in Place(place).manifests().items() if manifest]


def restore(folder: Path, *places: str, seed: int = 1) -> RunRecord:
    run = RunRecord(folder)
    restoring.restore_copies(run, RunIdentity({"seed": seed}, ["seed"]), sync_from=places[0], sync_to=places[-1])
    return run


def test_a_restored_checkpoint_equals_its_original(run: Path, place: str, tmp_path: Path) -> None:
    save_and_copy(run, place, 2)
    restored = restore(tmp_path / "restored", place)
    files = [path.relative_to(run) for path in run.rglob("*") if path.is_file()]
    assert len(files) == 6
    assert all((restored.path / file).read_bytes() == (run / file).read_bytes() for file in files)
    assert copy(run, 2, place) == 0  # a complete copy is not repeated
    assert not list(restored.path.glob(".restoring*"))


def test_a_restored_checkpoint_is_verified_while_it_is_copied(run, place: str, tmp_path: Path, monkeypatch) -> None:
    save_and_copy(run, place, 2)
    monkeypatch.setattr("gpt2_repro.checkpoints.manifest.sha256_of", None)  # the files are not read again
    other, identity = RunRecord(tmp_path / "other"), RunIdentity({"seed": 1})
    restored = restoring.restore_copies(other, identity, sync_from=place, sync_to="")
    assert newest_complete(other.path, verified=restored) == (other.path / "checkpoint-2", [])


def test_copies_are_rotated_like_checkpoints(run: Path, place: str) -> None:
    for step in (2, 4, 6, 8, 10):
        save(run, step, rolling=step == 8)
        copy(run, step, place, keep_every=6)
        rotate(run, Rotation(2, keep_every=6))
        assert set(steps_at(place)) == {int(path.name[11:]) for path in run.glob("checkpoint-*")}
    assert steps_at(place) == [10, 6]  # a rolling one is not counted, so 4 and 6 were the lasting two


def test_the_best_checkpoint_is_kept_by_a_machine_that_does_not_have_it(run: Path, place: str, tmp_path: Path) -> None:
    save_and_copy(run, place, 4, 6, 8, keep=1, keep_best=True)
    other = restore(tmp_path / "other", place).path
    assert [path.name for path in other.glob("checkpoint-*")] == ["checkpoint-8"]
    save_and_copy(other, place, 10, keep=1, keep_best=True)
    assert steps_at(place) == [10, 4]


def test_copies_after_the_step_that_a_run_went_back_to_are_deleted(run: Path, place: str) -> None:
    save_and_copy(run, place, 2, 4, 6)
    set_aside(run, after=2)
    save(run, 3)
    assert steps_at(place) == [6, 4]
    assert newest_step(restore(run, place).path) == 3  # as after a crash before the next copy
    copy(run, 3, place)
    assert steps_at(place) == [3]


def damage(place: str, step: int, file: str) -> None:
    """Damage a file of the copy of a checkpoint."""
    there = Place(place)
    there.fs.pipe_file(f"{there.root}/checkpoint-{step}/{file}", b'{"files": {')


@pytest.mark.parametrize("file", ["manifest.json", "config.json", None])
def test_a_damaged_copy_falls_back_to_the_one_before(file: str | None, run: Path, place: str, tmp_path: Path) -> None:
    save_and_copy(run, place, 2, 4)
    if file:
        damage(place, 4, file)
    else:
        Place(place).fs.rm_file(f"{Place(place).root}/checkpoint-4/manifest.json")
    restored = restore(tmp_path / "restored", place).path
    assert [path.name for path in restored.glob("checkpoint-*")] == ["checkpoint-2"]
    save_and_copy(restored, place, 3)
    assert steps_at(place) == [3, 2]
    assert copy(run, 4, place) and steps_at(place) == [4, 3]  # repairs a copy whose manifest differs


def test_a_run_with_damaged_copies_only_does_not_start_again(run: Path, place: str, tmp_path: Path) -> None:
    save_and_copy(run, place, 2)
    damage(place, 2, "config.json")
    with pytest.raises(UserError, match="damaged"):
        restore(tmp_path / "restored", place)
    assert newest_step(restore(run, place).path) == 2  # a machine with its own checkpoint continues


def test_nothing_is_restored_over_a_checkpoint_as_new(run: Path, place: str, tmp_path: Path) -> None:
    save_and_copy(run, place, 2)
    other = tmp_path / "other"
    save(other, 2, mine=True)
    restore(other, place)
    assert read_manifest(other / "checkpoint-2")["mine"]
    assert steps_at(f"{place}-of-nobody") == []


def test_a_manifest_cannot_name_files_outside_of_the_checkpoint(run: Path, tmp_path: Path) -> None:
    save(run, 2)
    manifest = read_manifest(run / "checkpoint-2")
    manifest["files"]["../../.bashrc"] = manifest["files"]["config.json"]
    manifest["sha256"] = manifest_hash(manifest)
    (run / "checkpoint-2" / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    with pytest.raises(UserError, match="outside"):
        restore(tmp_path / "restored", str(run))


def test_a_copy_of_another_run_changes_nothing(run: Path, place: str, tmp_path: Path) -> None:
    save_and_copy(run, place, 4)
    save(tmp_path / "mine", 2)
    before = {path: path.read_bytes() for path in (tmp_path / "mine").rglob("*") if path.is_file()}
    for folder in ("mine", "empty"):
        with pytest.raises(UserError, match="other settings.*seed 1 -> 2.*--sync_to"):
            restore(tmp_path / folder, place, seed=2)
    assert {path: path.read_bytes() for path in (tmp_path / "mine").rglob("*") if path.is_file()} == before
    assert not (tmp_path / "empty").exists()


class Mounted(DirFileSystem):
    """The local disk, which the program does not know as such."""

    protocol = "mounted"

    def __init__(self, **options: Any) -> None:
        super().__init__(path="/", fs=LocalFileSystem(), **options)


def test_the_run_directory_behind_another_address_is_refused(run: Path) -> None:
    fsspec.register_implementation("mounted", Mounted, clobber=True)
    save(run, 2)
    (run / ".lock").write_text("process 1 on elsewhere", encoding="utf-8")
    place = f"mounted://{run}"
    with pytest.raises(UserError, match="run directory"):
        restore(run, place)
    RunRecord(run).lock()
    with pytest.raises(UserError, match="run directory"):
        copy(run, 2, place)


def test_a_final_model_is_restored_with_its_checkpoint(run: Path, place: str, tmp_path: Path) -> None:
    archive(tmp_path / "other", place, "final")
    save_and_copy(run, place, 6)
    restored = restore(tmp_path / "restored", place)
    assert defect(restored.final, read_files=True) is None and newest_step(restored.path) == 6


def test_a_file_larger_than_its_manifest_says_is_not_restored(run: Path, place: str, tmp_path: Path, monkeypatch):
    save_and_copy(run, place, 2)
    Place(place).put(run / "checkpoint-2" / "shards" / "weights.bin", "checkpoint-2/config.json")
    assert "config.json is larger" in restoring._fetch(Place(place), "checkpoint-2", tmp_path)
    monkeypatch.setattr(restoring, "SMALL_BYTES", 1)
    shutil.copytree(run / "checkpoint-2", run / "final")
    copying.copy(Place(place), str(run), "final", KEEP_TWO, RunIdentity({"seed": 1}))
    Place(place).put(run / "final" / "config.json", "final/README.md")  # not in the manifest
    assert "README.md is larger" in restoring._fetch(Place(place), "final", tmp_path)
    assert {path.name for path in (tmp_path / "final").rglob("*.*")} == {"config.json", "weights.bin"}


def archive(run: Path, place: str, kind: str) -> None:
    """Fill a place with another run without checkpoints, or with other files."""
    if kind in ("final", "final alone"):
        save_and_copy(run, place, 4)
        environment = {"environment": {"run_identity": {"seed": 1}}}
        (run / "checkpoint-4" / "manifest.json").unlink()
        publish(run / "checkpoint-4", run / "final")
        seal(run / "final", {}, step=4, **environment)
        copying.copy(Place(place), str(run), "final", KEEP_TWO, RunIdentity({"seed": 1}))
        Place(place).remove("checkpoint-4")
        if kind == "final alone":
            Place(place).remove("environment.json")
    else:
        run.mkdir()
        (run / "notes.txt").write_text("notes", encoding="utf-8")
        Place(place).put(run / "notes.txt", kind)


# With seed 1, the new start has the settings of the archived run, but has trained fewer steps.
KINDS = [(kind, 2) for kind in ("final", "final alone", "notes.txt", "run/notes.txt", "final/notes.txt")]


@pytest.mark.parametrize(("kind", "mine"), [*KINDS, ("final", 1)])
def test_files_of_others_are_not_replaced_or_deleted(run: Path, place: str, kind: str, mine: int, tmp_path: Path):
    """A run is refused before it starts, and also by the copier, for files that appeared later."""
    archive(tmp_path / "other", place, kind)
    before = files_at(place)
    with pytest.raises(UserError, match="--sync_to"):
        restore(run, place, seed=mine)
    save(run, 2, mine=True)
    for name in ("checkpoint-2", "final", ""):
        with pytest.raises(UserError, match="--sync_to"):
            copying.copy(Place(place), str(run), name, Rotation(1), RunIdentity({"seed": mine}))
    assert files_at(place) == before


def test_a_change_of_settings_does_not_reach_the_copies_of_another_run(run: Path, tmp_path: Path) -> None:
    """With --allow_resume_change, only a place with an earlier state of the same run is accepted."""
    place = str(tmp_path / "place")
    save_and_copy(tmp_path / "other", place, 2)
    save(run, 4)
    owner = RunIdentity({"seed": 3}, ["seed"], allow_change=True)

    def accept(folder: Path) -> None:
        restoring.restore_copies(RunRecord(folder), owner, sync_from="", sync_to=place)

    accept(run)  # it was trained with seed 1, too
    shutil.rmtree(run / "checkpoint-4")
    (run / "environment.json").write_text('{"run_identity": {"seed": 2}}', encoding="utf-8")
    with pytest.raises(UserError, match=r"seed 1 -> 3\)\. Undo the change or pass another --sync_to\.$"):
        accept(run)
    (run / "metrics.jsonl").write_bytes((tmp_path / "other" / "metrics.jsonl").read_bytes())
    accept(run)  # the log began at the same time
    accept(tmp_path / "empty")


def test_a_place_that_another_run_took_is_a_mistake(run: Path, tmp_path: Path) -> None:
    place = str(tmp_path / "place")
    save(run, 2)
    copier = copying.RunCopier(RunRecord(run), place, KEEP_TWO, RunIdentity({"seed": 2}))
    archive(tmp_path / "other", place, "notes.txt")
    with pytest.raises(UserError, match="neither empty"):
        copier.require_place()
    copier.process.process.kill()


def test_only_the_exact_folder_is_deleted(run: Path, place: str) -> None:
    """fsspec's `rm` would expand place[1] to place1."""
    other = place.replace("[1]", "1")
    for step in (2, 4):
        save(run, step)
        copy(run, step, other)
        copy(run, step, place, keep=1)
    assert steps_at(other) == [4, 2] and steps_at(place) == [4]
    assert all("checkpoint-4/" in path or "checkpoint-" not in path for path in files_at(place))


def test_files_behind_a_link_are_not_deleted(run: Path, tmp_path: Path) -> None:
    place, other = tmp_path / "place", tmp_path / "other"
    save_and_copy(run, str(place), 2, 4)
    (place / "checkpoint-2").rename(other)
    (place / "checkpoint-2").symlink_to(other)
    save_and_copy(run, str(place), 6, keep=1)
    assert steps_at(str(place)) == [6] and defect(other, read_files=True) is None
    assert not (place / "checkpoint-2").is_symlink()


def test_the_newest_copy_of_two_places_is_restored(run: Path, place: str, tmp_path: Path) -> None:
    """A machine that is replaced for the second time continues from --sync_to, and not from --sync_from."""
    first = str(tmp_path / "first")
    save_and_copy(run, first, 2)
    save_and_copy(run, place, 4)
    for folder, second, step in (("second", place, 4), ("third", f"{place}-of-nobody", 2)):
        assert newest_step(restore(tmp_path / folder, first, second).path) == step


def test_newer_copies_of_another_start_are_kept(run: Path, place: str, tmp_path: Path) -> None:
    """A start that could not see the copies, and began at step 0, must not replace them."""
    save_and_copy(run, place, 4)
    log = Place(place).read("metrics.jsonl")
    save(tmp_path / "blind", 2)
    with pytest.raises(RunFailed, match="newer step 4"):
        copy(tmp_path / "blind", 2, place)
    assert steps_at(place) == [4] and Place(place).read("metrics.jsonl") == log


@pytest.mark.parametrize("method", ["manifest", "remove", "put"])
def test_a_checkpoint_deleted_while_it_is_copied_replaces_no_copy(run, place, method: str, monkeypatch) -> None:
    save_and_copy(run, place, 2, keep=1)
    save(run, 4)
    original = getattr(Place, method)

    def call(self: Place, *words: Any) -> Any:
        if (run / "checkpoint-4").is_dir() and "checkpoint-4" in str(words[-1]):
            discard(run / "checkpoint-4")
        return original(self, *words)

    with monkeypatch.context() as patch:
        patch.setattr(Place, method, call)
        assert copy(run, 4, place, keep=1) == 0
    assert not (run / "checkpoint-4").exists() and steps_at(place) == [2]


def fill_temporary_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every new temporary file fail, as on a full disk."""

    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for name in ("mkdtemp", "mkstemp", "NamedTemporaryFile", "TemporaryFile"):
        monkeypatch.setattr(tempfile, name, fail)


def test_copies_need_no_temporary_folder(run: Path, place: str, monkeypatch) -> None:
    save(run, 2)
    fill_temporary_folder(monkeypatch)
    assert copy(run, 2, place) > 0 and steps_at(place) == [2]
    files = files_at(place).items()
    assert len(files) == 6
    for path, content in files:
        assert (run / path.partition("place[1]/")[2]).read_bytes() == content


def test_copies_to_a_bucket_of_the_hub_need_no_temporary_folder(tmp_path: Path, monkeypatch) -> None:
    """fsspec's way to write to a bucket copies each file to TMPDIR first."""
    added: list[tuple[str, bytes, str]] = []

    def add_files(api: HfApi, bucket: str, add: list[tuple[Path | bytes, str]]) -> None:
        for source, path in add:
            added.append((bucket, source if isinstance(source, bytes) else source.read_bytes(), path))

    monkeypatch.setattr(HfApi, "batch_bucket_files", add_files)
    monkeypatch.setattr(HfApi, "bucket_info", lambda *args, **kwargs: None)  # it exists
    monkeypatch.setattr(HfFileSystem, "makedirs", lambda *args, **kwargs: None)
    fill_temporary_folder(monkeypatch)
    (tmp_path / "weights").write_bytes(b"weights")
    place = Place("hf://buckets/me/mine/run")
    place.put(tmp_path / "weights", "final/weights")
    place.write(b"log", "metrics.jsonl")
    assert added == [("me/mine", b"weights", "run/final/weights"), ("me/mine", b"log", "run/metrics.jsonl")]


def test_a_place_that_cannot_be_read_is_a_failure_that_is_retried(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunFailed):
        restore(tmp_path / "run", str(tmp_path / "file" / "place"))


def test_a_new_run_needs_a_place_that_can_be_written(typed, tmp_path: Path) -> None:
    (tmp_path / "place" / "environment.json.partial").mkdir(parents=True)  # a file cannot replace it
    done = typed(tmp_path / "run", "--sync_to", tmp_path / "place")
    assert done.returncode == 1 and "Traceback" not in done.stderr and not steps_at(str(tmp_path / "run")), done.stdout


SAME = ("{run}", "{run}/copy", "{run}/../run/", "file://{run}", "local://{run}", "{parent}")
LOST = ("memory://run", "simplecache::file://{run}-copy", "dir::memory://run")
SECRETS = ("s3://key:secret@bucket/run", "az://bucket/run?sig=secret")
SSH = ("me@host:run", "sftp://host/run", "dir::ssh://host/run")


@pytest.mark.parametrize("name", ["nope://bucket/run", "oci://bucket/run", *SAME, *LOST, *SECRETS, *SSH])
def test_a_wrong_place_is_named_before_the_training(name: str, tiny_recipe: Path, type_warm, tmp_path: Path) -> None:
    run = tmp_path / "run"
    place = name.format(run=run, parent=tmp_path)
    done = type_warm("python", "train.py", tiny_recipe, "--output_dir", run, "--sync_to", place)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and "secret" not in done.stderr, done.stderr
    assert "--sync_to" in done.stderr and not run.exists()


def test_a_run_continues_on_another_machine(train, events, tmp_path: Path) -> None:
    """A run that is stopped, deleted and restored ends like a run that was not."""
    place, options = tmp_path / "place", ("--save_steps", 2)
    straight = train(tmp_path / "straight", *options)
    first = train(tmp_path / "first", *options, "--stop_at_step", 5, "--sync_to", place)
    assert steps_at(str(place))[0] == 5
    assert (place / "run_status.json").read_bytes() == (first / "run_status.json").read_bytes()
    shutil.rmtree(first)
    second = train(tmp_path / "second", *options, "--sync_to", place)
    weights = [(folder / "final" / "model.safetensors").read_bytes() for folder in (straight, second, place)]
    assert weights[0] == weights[1] == weights[2]
    losses = [[event["loss"] for event in events(run) if "loss" in event] for run in (straight, place)]
    assert losses[0] == losses[1]
    assert str(place) not in (second / "recipe.yaml").read_text(encoding="utf-8")
    # A third machine gets the finished run, and changes nothing.
    third = train(tmp_path / "third", *options, "--sync_from", place)
    assert (third / "final" / "model.safetensors").read_bytes() == weights[0]
    assert events(third) == events(second)


def test_a_copy_that_fails_does_not_stop_the_training(train, tiny_recipe: Path, type_warm, tmp_path: Path) -> None:
    """The command fails after the end of the run."""
    place, run = tmp_path / "place", tmp_path / "run"
    train(run, "--stop_at_step", 2, "--sync_to", place)
    (place / "metrics.jsonl.partial").mkdir()  # a file cannot replace it
    words = ("train.py", tiny_recipe, "--output_dir", run, "--sync_to", place)
    done = type_warm("python", *words)
    assert done.returncode == 1 and "NOT COPIED" in done.stdout and "Traceback" not in done.stdout + done.stderr
    assert RunRecord(run).status().state == "complete"
    (place / "metrics.jsonl.partial").rmdir()
    done = type_warm("python", *words)
    assert done.returncode == 0 and steps_at(str(place)) and (place / "final" / "manifest.json").is_file(), done.stderr


def test_a_relative_place_is_relative_to_the_folder_of_the_command(tmp_path: Path, monkeypatch) -> None:
    """The process that copies has another working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    assert absolute("file://run") == f"file://{tmp_path}/run" and absolute("local://run") == f"local://{tmp_path}/run"
    names = {"copy/run": f"{tmp_path}/copy/run", "~/run": "/home/me/run", "s3://b/run": "s3://b/run"}
    assert {name: absolute(name) for name in names} == names


@pytest.mark.parametrize("option", ["--sync_from", "--sync_to"])
@pytest.mark.parametrize("name", ["user@host:run", "memory://run", "s3://key:secret@bucket/run", "nothing://run"])
def test_a_refused_place_is_named_with_its_option(name: str, option: str, tmp_path: Path) -> None:
    places = {"sync_from": "", "sync_to": ""} | {option.removeprefix("--"): name}
    with pytest.raises(UserError) as raised:
        restoring.restore_copies(RunRecord(tmp_path / "run"), RunIdentity({"seed": 1}), **places)
    (other,) = {"--sync_from", "--sync_to"} - {option}
    assert option in str(raised.value) and other not in str(raised.value)


def test_the_copier_starts_quickly() -> None:
    """The copier imports neither torch nor transformers."""
    code = "import sys; from gpt2_repro.checkpoints import copying; sys.exit(bool({'torch', 'transformers'} & sys.modules.keys()))"
    subprocess.run([sys.executable, "-c", code], check=True)

"""What an interrupted preparation leaves behind is taken up, refused or cleared away, and never taken for another one."""

import errno
import json
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from gpt2_repro.data import shards
from gpt2_repro.data.arguments import PreparationOptions
from gpt2_repro.data.preparation import prepare as module
from gpt2_repro.data.preparation.prepare import prepare
from gpt2_repro.data.preparation.staged import StagedPart
from gpt2_repro.data.sources import text_files
from gpt2_repro.errors import UserError


class Killed(BaseException):
    pass


def killed_at(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, call: int, run: Callable[[], object]) -> None:
    """Run until the function `name` has been called so often."""
    calls = 0
    function = getattr(owner, name)

    def counted(*words: object, **named: object) -> object:
        nonlocal calls
        calls += 1
        if calls == call:
            raise Killed
        return function(*words, **named)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, counted)
        with pytest.raises(Killed):
            run()


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_files, "PART_BYTES", 2000)
    monkeypatch.setattr(shards, "BLOCK_IDS", 400)


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("split", ["head", "hash"])
@pytest.mark.parametrize("packing", ["concat", "wrap"])
def test_rows_are_cut_again_after_an_interruption(
    arguments, monkeypatch: pytest.MonkeyPatch, split: str, packing: str
) -> None:
    form = {"split": split, "packing": packing, "validation_fraction": 0.1}
    alone = prepare(arguments("alone", **form))
    args = arguments("cut", **form)
    for shard in (2, sum(map(len, alone["shards"].values()))):
        killed_at(monkeypatch, shards, "_write_shard", shard, lambda: prepare(args))
    staged = Path(args.dataset_dir + ".staging", "streams")
    kept = {path: path.stat().st_mtime_ns for path in staged.rglob("*.ids")}
    killed_at(monkeypatch, module, "describe", 1, lambda: prepare(args))
    assert kept == {path: path.stat().st_mtime_ns for path in staged.rglob("*.ids")}
    assert prepare(args) == json.loads(json.dumps(alone))


def test_what_killed_workers_had_begun_is_removed(arguments, monkeypatch: pytest.MonkeyPatch) -> None:
    args = arguments("cut")
    killed_at(monkeypatch, shards, "_write_shard", 1, lambda: prepare(args))
    partial = Path(args.dataset_dir + ".staging", "streams", "train-0", "00001-00000.123.partial")
    partial.write_bytes(b"half")
    killed_at(monkeypatch, shards, "_write_shard", 1, lambda: prepare(args))
    assert not partial.exists()


def test_a_file_that_was_mended_is_staged_again(
    arguments, corpus: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "text.jsonl"
    source.write_text(corpus[0].read_text())
    args = arguments("cut", data_files=[str(source)])
    killed_at(monkeypatch, shards, "_write_shard", 1, lambda: prepare(args))
    source.write_text(corpus[0].read_text().replace("a", "b"))  # as many bytes
    assert prepare(args)["sha256"] == prepare(arguments("alone", data_files=[str(source)]))["sha256"]


def test_a_finished_staging_is_not_published_for_another_request(arguments, monkeypatch: pytest.MonkeyPatch) -> None:
    args = arguments("cut")
    killed_at(monkeypatch, module, "_publish", 1, lambda: prepare(args))
    with pytest.raises(UserError, match="an interrupted preparation with sequence_length 32, not 16"):
        prepare(arguments("cut", sequence_length=16))
    assert prepare(args)["request"]["sequence_length"] == 32


def test_what_a_kill_behind_the_renaming_leaves_is_cleared_away(arguments, monkeypatch: pytest.MonkeyPatch) -> None:
    args = arguments("cut")
    staging = Path(args.dataset_dir + ".staging")
    killed_at(monkeypatch, module, "remove_folder", 1, lambda: prepare(args))
    assert Path(args.dataset_dir).exists() and staging.exists()
    kept = shutil.copytree(staging, staging.with_name("kept"))
    first = prepare(args)
    assert not staging.exists()
    kept.rename(staging)
    assert prepare(args, PreparationOptions(overwrite=True)) == first
    assert not staging.exists()


def test_an_interrupted_overwrite_is_kept_beside_the_finished_folder(
    arguments, monkeypatch: pytest.MonkeyPatch
) -> None:
    args, overwrite = arguments("cut"), PreparationOptions(overwrite=True)
    first = prepare(args)
    killed_at(monkeypatch, module, "_publish", 1, lambda: prepare(args, overwrite))
    killed_at(monkeypatch, shards, "_write_shard", 2, lambda: prepare(arguments("other"), overwrite))
    assert prepare(args) == json.loads(json.dumps(first))
    assert Path(args.dataset_dir + ".staging", "folder").exists()
    assert prepare(args, overwrite) == json.loads(json.dumps(first))


def test_a_mistake_behind_the_tokenizer_leaves_nothing(arguments, corpus: list[Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="use --separator none"):
        prepare(arguments(tokenizer="char"))
    assert not list(tmp_path.iterdir())
    assert prepare(arguments(tokenizer="char", separator="none"))["request"]["separator"] == "none"


def test_a_damaged_manifest_is_named(arguments) -> None:
    args = arguments()
    prepare(args)
    Path(args.dataset_dir, "manifest.json").write_text("{")
    with pytest.raises(UserError, match="manifest.json is missing or damaged"):
        prepare(args)


def test_a_folder_without_a_name_is_refused(arguments) -> None:
    args = arguments()
    args.dataset_dir = "."
    with pytest.raises(UserError, match="--dataset_dir . has no name of its own"):
        prepare(args, PreparationOptions(overwrite=True))


def test_lengths_that_do_not_fit_fail_with_their_number(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(OSError) as error:
            StagedPart(tmp_path, "part").complete(np.zeros(10**6, np.int64), None, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert error.value.errno == errno.EFBIG  # a full disk: ENOSPC


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is always full")
@pytest.mark.parametrize(
    ("name", "owner", "function"),
    [
        ("streams/train-0/00000-00000.lengths.npy", module, "stage_groups"),
        ("folder/validation/data-00000.arrow", shards, "_write_shard"),
    ],
)
def test_a_full_disk_is_one_line_and_taken_up(
    arguments, monkeypatch: pytest.MonkeyPatch, name: str, owner: object, function: str
) -> None:
    args = arguments("cut")
    path = Path(args.dataset_dir + ".staging", name)

    def fill(*words: object, **named: object) -> object:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to("/dev/full")
        return original(*words, **named)

    original = getattr(owner, function)
    with monkeypatch.context() as patch:
        patch.setattr(owner, function, fill)
        with pytest.raises(UserError, match="the disk of .*cut is full: free some room and start the same command"):
            prepare(args)
    path.unlink()
    assert prepare(args)["sha256"] == prepare(arguments("alone"))["sha256"]


def test_a_folder_that_cannot_be_made_is_named(arguments, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file/out.staging cannot be made \(Not a directory\): name another"):
        prepare(arguments("file/out"))


@pytest.mark.parametrize("overwrite", [False, True])
def test_folders_of_others_are_never_touched(arguments, overwrite: bool) -> None:
    """A foreign X.staging or X.replaced keeps its files, before, during and after the preparation of X."""
    args = arguments("out")
    options = PreparationOptions(overwrite=overwrite)
    for name in ("staging", "replaced"):
        folder = Path(f"{args.dataset_dir}.{name}")
        folder.mkdir()
        (folder / "thesis.txt").write_text("mine")
    theirs = Path(f"{args.dataset_dir}.staging", "thesis.txt")
    for changed in (args, arguments("out", data_files=["nothing*.jsonl"])):
        with pytest.raises(UserError, match="thesis.txt"):
            prepare(changed, options)
        assert theirs.read_text() == "mine"
    theirs.unlink()  # an empty folder is accepted
    prepare(args, options)
    prepare(args, options)
    prepare(args, options)
    assert Path(f"{args.dataset_dir}.replaced", "thesis.txt").read_text() == "mine"


def test_a_foreign_staging_next_to_a_finished_folder_stays(arguments) -> None:
    args = arguments("out")
    prepare(args)
    theirs = Path(f"{args.dataset_dir}.staging", "thesis.txt")
    theirs.parent.mkdir()
    theirs.write_text("mine")
    prepare(args)
    assert theirs.read_text() == "mine"

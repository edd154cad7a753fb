"""An interrupted preparation resumes, and gives the same folder."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from gpt2_repro.data.arguments import PreparationOptions
from gpt2_repro.data.preparation import prepare as module
from gpt2_repro.data.preparation import staging, writing
from gpt2_repro.data.preparation.prepare import prepare
from gpt2_repro.data.sources import local_files
from gpt2_repro.errors import UserError


OVERWRITE = PreparationOptions(overwrite=True)


class Killed(BaseException):
    pass


@pytest.fixture
def killed_at(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that interrupts `run` at a certain call of `owner.name`."""

    def start(owner: object, name: str, call: int, run: Callable[[], object]) -> None:
        calls = itertools.count(1)
        function = getattr(owner, name)

        def counted(*words: object, **named: object) -> object:
            if next(calls) == call:
                raise Killed
            return function(*words, **named)

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, counted)
            with pytest.raises(Killed):
                run()

    return start


def test_rows_are_cut_again_after_an_interruption(arguments, killed_at, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_files, "PART_BYTES", 2000)
    monkeypatch.setattr(writing, "BLOCK_IDS", 400)
    form = {"split": "hash", "validation_fraction": 0.1}
    alone, args = prepare(arguments("alone", **form)).manifest, arguments("cut", **form)
    for shard in (2, sum(map(len, alone.shards.values()))):
        killed_at(writing, "_write_shard", shard, lambda: prepare(args))
    staged = Path(args.dataset_dir + ".staging", "streams")
    kept = {path: path.stat().st_mtime_ns for path in staged.rglob("*.ids")}
    partial = staged / "train" / "00001-00000.123.partial"  # left by a killed worker
    partial.write_bytes(b"half")
    killed_at(writing, "Manifest", 1, lambda: prepare(args))
    assert kept == {path: path.stat().st_mtime_ns for path in staged.rglob("*.ids")}
    assert not partial.exists()
    assert prepare(args).manifest == alone


@pytest.mark.parametrize("split", ["head", "hash"])
def test_small_files_share_parts_and_give_the_same_folder(
    arguments, documents: list[str], tmp_path: Path, killed_at, monkeypatch: pytest.MonkeyPatch, content, split: str
) -> None:
    folder = tmp_path / "many"
    folder.mkdir()
    for number in range(500):
        text = documents[number % 120][number % 7 : number % 50]  # some files are empty
        (folder / f"{number:03d}.txt").write_text(text, encoding="utf-8")
    (folder / "123.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n{"body": ""}\n', encoding="utf-8")
    (folder / "234.txt").write_text(" ".join(documents[:30]), encoding="utf-8")
    form = {"data_files": [str(folder)], "split": split, "validation_fraction": 0.1, "validation_text": True}
    skip = PreparationOptions(max_bad_documents=1)
    args, alone = arguments("joined", **form), arguments("alone", **form)
    killed_at(staging, "write_whole", 120, lambda: prepare(args, skip))
    assert 20 < len(list(Path(args.dataset_dir + ".staging").rglob("*-00000.json"))) <= 40
    prepare(args, PreparationOptions(max_bad_documents=1, num_proc=2))
    monkeypatch.setattr(local_files, "FEW_PARTS", 10**9)  # no files are joined
    prepare(alone, skip)
    assert content(args.dataset_dir) == content(alone.dataset_dir)


def test_a_changed_file_is_staged_again(arguments, corpus: list[Path], tmp_path: Path, killed_at) -> None:
    source, text = tmp_path / "text.jsonl", corpus[0].read_text(encoding="utf-8")
    source.write_text(text, encoding="utf-8")
    args = arguments("cut", data_files=[str(source)])
    killed_at(writing, "_write_shard", 1, lambda: prepare(args))
    source.write_text(text.replace("a", "b"), encoding="utf-8")  # the same number of bytes
    assert prepare(args).manifest.sha256 == prepare(arguments("alone", data_files=[str(source)])).manifest.sha256


@pytest.mark.parametrize("killed", [(writing, "_write_shard"), (module, "_publish")])
def test_unfinished_work_is_kept_from_another_request(arguments, killed_at, killed) -> None:
    args = arguments("cut")
    killed_at(*killed, 1, lambda: prepare(args))
    kept = sorted(Path(args.dataset_dir + ".staging").rglob("*"))
    with pytest.raises(UserError, match="--sequence_length 32.*--sequence_length 16"):
        prepare(arguments("cut", sequence_length=16))
    assert sorted(Path(args.dataset_dir + ".staging").rglob("*")) == kept
    assert prepare(args).manifest.request["sequence_length"] == 32


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("killed", [(module, "_empty", 2), (Path, "rename", 3), (module, "_remove", 1)])
def test_a_kill_while_a_folder_is_replaced_is_finished(
    arguments, killed_at, tmp_path: Path, killed, overwrite: bool
) -> None:
    prepare(arguments())
    other = arguments(sequence_length=16)
    killed_at(*killed, lambda: prepare(other, OVERWRITE))
    assert (tmp_path / "out").exists() == (killed[0] is module)  # killed between the two renames, or before or after
    assert (tmp_path / "out.staging").exists()
    options = PreparationOptions(overwrite=overwrite or killed[1] == "_empty")
    assert prepare(other, options).manifest.request["sequence_length"] == 16
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_interrupted_overwrite_is_kept_beside_the_finished_folder(arguments, killed_at) -> None:
    args = arguments("cut")
    first = prepare(args)
    for function in ((module, "_publish", 1), (writing, "_write_shard", 2)):
        killed_at(*function, lambda: prepare(args, OVERWRITE))
        for options, kept in ((None, True), (OVERWRITE, False)):
            assert prepare(args, options) == first
            assert Path(args.dataset_dir + ".staging").exists() == kept


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is always full")
def test_a_full_disk_is_one_line_and_work_resumes(arguments, monkeypatch: pytest.MonkeyPatch) -> None:
    args = arguments("cut", validation_text=True)
    path = Path(args.dataset_dir + ".staging", "folder", "validation", "data-00000.arrow")
    original = writing._write_shard

    def fill(*words: object) -> object:
        path.symlink_to("/dev/full")
        return original(*words)

    with monkeypatch.context() as patch:
        patch.setattr(writing, "_write_shard", fill)
        with pytest.raises(UserError, match="cut is full"):
            prepare(args)
    path.unlink()
    assert prepare(args).manifest == prepare(arguments("alone", validation_text=True)).manifest


def test_files_of_others_in_a_folder_are_never_deleted(arguments, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a prepared folder, in a staging folder, and in a folder that was made during the preparation."""
    args = arguments("out")
    target, staging = Path(args.dataset_dir), Path(f"{args.dataset_dir}.staging")
    write_folder = module.write_folder

    def write(*words: object) -> None:
        write_folder(*words)
        target.mkdir()
        (target / "thesis.txt").write_text("mine", encoding="utf-8")

    with monkeypatch.context() as patch:
        patch.setattr(module, "write_folder", write)
        with pytest.raises(UserError):
            prepare(args)
    assert (target / "thesis.txt").read_text(encoding="utf-8") == "mine"
    (target / "thesis.txt").unlink()
    prepare(args)  # the finished rows are used
    assert not staging.exists()
    for theirs in (target / "thesis.txt", staging / "thesis.txt"):
        staging.mkdir(exist_ok=True)
        (staging / "request.json").write_text(json.dumps({"request": {}}), encoding="utf-8")
        theirs.write_text("mine", encoding="utf-8")
        with pytest.raises(UserError, match="thesis.txt"):
            prepare(args, OVERWRITE)
        assert theirs.read_text(encoding="utf-8") == "mine" and (target / "manifest.json").is_file()
        theirs.unlink()
    prepare(arguments("out", sequence_length=16), OVERWRITE)
    assert not staging.exists()

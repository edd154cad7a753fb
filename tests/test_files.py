"""Files are written completely or not at all, and damaged files can be read.

A damaged JSON file is read as an empty object. Damaged lines of a JSONL file are skipped.
"""

import errno
import gzip
import json
import math
import multiprocessing
import os
import stat
from pathlib import Path

import pytest

from gpt2_repro import files
from gpt2_repro.checkpoints.manifest import defect, seal
from gpt2_repro.checkpoints.rotation import publish
from gpt2_repro.errors import UserError
from gpt2_repro.run_record import events


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "new" / "page.html"
    files.write_whole(path, "first ü")
    files.write_whole(path, b"second")

    def interrupted(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(files.os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        files.write_whole(path, "third")
    assert path.read_bytes() == b"second" and [p.name for p in path.parent.iterdir()] == ["page.html"]


@pytest.fixture
def folders_cannot_be_synced(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> list[int]:
    """Let fsync fail for folders with the errno `request.param`. Return the inodes of the synced files."""
    synced: list[int] = []

    def fsync(descriptor: int) -> None:
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            raise OSError(request.param, os.strerror(request.param))
        synced.append(status.st_ino)

    monkeypatch.setattr(files.os, "fsync", fsync)
    files._warn_of_folders.cache_clear()
    return synced


@pytest.mark.parametrize("folders_cannot_be_synced", [errno.EINVAL, errno.EBADF, errno.ENOTSUP], indirect=True)
def test_a_file_system_that_cannot_sync_folders(folders_cannot_be_synced, tmp_path: Path, caplog) -> None:
    """Files are still synced, and one warning is logged."""
    staged = tmp_path / "staging" / "checkpoint-2"
    (staged / "shards").mkdir(parents=True)
    (staged / "shards" / "weights.bin").write_bytes(b"weights")
    seal(staged, {})
    publish(staged, tmp_path / "checkpoint-2")
    files.sync_folder(tmp_path)
    assert defect(tmp_path / "checkpoint-2", read_files=True) is None
    written = [path.stat().st_ino for path in (tmp_path / "checkpoint-2").rglob("*") if path.is_file()]
    assert len(written) == 2 and set(written) <= set(folders_cannot_be_synced)
    assert len(caplog.records) == 1


@pytest.mark.parametrize("folders_cannot_be_synced", [errno.EIO, errno.ENOSPC], indirect=True)
def test_a_failing_disk_is_not_ignored(folders_cannot_be_synced, tmp_path: Path) -> None:
    with pytest.raises(OSError):
        files.sync(tmp_path)


def test_a_file_that_cannot_be_synced_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fsync(descriptor: int) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    (tmp_path / "weights").touch()
    monkeypatch.setattr(files.os, "fsync", fsync)
    with pytest.raises(OSError):
        files.sync(tmp_path / "weights")


def test_an_undefined_variable_does_not_stay_in_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOLDER", str(tmp_path))
    monkeypatch.setenv("HOME", "/home/me")
    (tmp_path / "cost$5.txt").touch()
    paths = {"$FOLDER/a": f"{tmp_path}/a", "${FOLDER}": str(tmp_path), "~/a": "/home/me/a", "a~b": "a~b", "": ""}
    paths[f"{tmp_path}/cost$5.txt"] = f"{tmp_path}/cost$5.txt"
    assert {path: files.expand(path) for path in paths} == paths
    for path in ("${UNSET}/a", "a/$UNSET", "$FOLDER/${UNSET}", "~nobody-here/a"):
        with pytest.raises(UserError, match="UNSET|nobody-here"):
            files.expand(path)


@pytest.mark.parametrize("option", ["--output_dir", "--dataset_dir", "--data_files", "--sync_to", "--sync_from"])
def test_an_undefined_variable_is_named(option: str, tiny_recipe: Path, type_warm, tmp_path: Path) -> None:
    script = "prepare_data.py" if option == "--data_files" else "train.py"
    done = type_warm("python", script, tiny_recipe, option, "${UNSET}/a")
    assert done.returncode == 2 and "${UNSET}" in done.stderr and len(done.stderr.splitlines()) == 1


def _write_many(path: Path, letter: str) -> None:
    for _ in range(300):
        files.write_whole(path, letter * 10_000)


def test_two_writers_never_mix_or_fail(tmp_path: Path) -> None:
    path = tmp_path / "shared.json"
    writer = multiprocessing.get_context("fork").Process(target=_write_many, args=(path, "b"))
    writer.start()
    _write_many(path, "a")
    writer.join()
    assert writer.exitcode == 0 and path.read_text(encoding="utf-8") in ("a" * 10_000, "b" * 10_000)
    assert list(tmp_path.iterdir()) == [path]


def test_a_line_after_a_torn_one_stands_alone(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes('{"text": "“'.encode()[:-1])  # inside a curly quote
    files.append_line(path, '{"step": 2}')
    files.append_line(path, '{"step": 3}')
    assert events.read(path) == ([{"step": 2}, {"step": 3}], 1)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_a_byte_order_mark_at_the_start_of_json_lines_is_skipped(tmp_path: Path, name: str) -> None:
    content = b"\xef\xbb\xbf" + b'{"text": "a"}\n\n[1]\n'
    path = tmp_path / name
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    assert list(files.read_json_lines(path)) == [(1, {"text": "a"}), (3, [1])]


def test_numbers_that_are_not_finite_are_null(tmp_path: Path) -> None:
    """Old files have NaN instead of null."""
    path = tmp_path / "metrics.jsonl"
    nested = {"sums": [math.inf, 1.5], "stop": False, "pair": (-math.inf, "NaN")}
    events.append(path, {"step": 2, "eval_loss": math.nan, "eval_a_loss": 3.5, "window": nested})
    strict = json.loads(path.read_text(encoding="utf-8"), parse_constant=pytest.fail)
    assert strict["eval_loss"] is None
    assert strict["window"] == {"sums": [None, 1.5], "stop": False, "pair": [None, "NaN"]}
    for text in (path.read_text(encoding="utf-8"), '{"step": 2, "eval_loss": NaN, "eval_a_loss": 3.5}'):
        path.write_text(text, encoding="utf-8")
        assert events.validation_losses(path) == {"eval_loss": None, "eval_a_loss": 3.5}

"""A file is there whole or not at all."""

from pathlib import Path

import pytest

from gpt2_repro import files


def test_a_file_is_written_and_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "new" / "page.html"
    files.write_whole(path, "first ü")
    files.write_whole(path, b"second")
    assert path.read_bytes() == b"second" and [p.name for p in path.parent.iterdir()] == ["page.html"]


def test_an_interrupted_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "page.html"
    files.write_whole(path, "old")

    def interrupted(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(files.os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        files.write_whole(path, "new")
    assert path.read_text() == "old"

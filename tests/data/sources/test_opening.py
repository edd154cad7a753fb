"""Which files a name means; no document is trained on twice or validated on by a second name."""

from pathlib import Path

import numpy as np
import pytest

from gpt2_repro.data.preparation.prepare import prepare
from gpt2_repro.data.sources.token_files import read_header
from gpt2_repro.errors import UserError


def test_a_name_with_brackets_is_a_file(arguments, corpus: list[Path], tmp_path: Path) -> None:
    book = tmp_path / "book [1].jsonl"
    book.write_bytes(corpus[1].read_bytes())
    wanted = prepare(arguments("wanted", data_files=[str(corpus[1])]))["counts"]
    assert prepare(arguments("files", data_files=[str(book)]))["counts"] == wanted
    assert prepare(arguments("source", data_files=[], source=str(book)))["counts"] == wanted


def test_a_file_by_two_names_is_read_once(
    arguments, corpus: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(corpus[0].parent)
    (tmp_path / "link.jsonl").symlink_to(corpus[1])
    names = [
        "a.jsonl",
        str(corpus[0]),
        str(corpus[1]),
        str(tmp_path / "link.jsonl"),
        f"../{corpus[0].parent.name}/[a].jsonl",
    ]
    assert prepare(arguments("names", data_files=names))["sha256"] == prepare(arguments("once"))["sha256"]


def test_a_mixture_with_a_file_twice_is_refused(arguments, corpus: list[Path], tmp_path: Path) -> None:
    first, second = corpus
    folder = first.parent
    for name in (f"{first}=1,{first}=2", f"{folder}/*.jsonl=1,{second}=1"):
        with pytest.raises(UserError, match=r"two sources of the mixture hold \S+\.jsonl: name it once"):
            prepare(arguments(data_files=[], source=name))
    assert not list(tmp_path.iterdir())
    prepare(arguments(data_files=[], source=f"{first}=1,{second}=1"))


def test_a_validation_set_that_is_trained_on_is_refused(arguments, corpus: list[Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the validation set mine would hold what is trained on, .*b.jsonl: name"):
        prepare(arguments(validation_sets=[f"mine={corpus[1]}"]))
    assert not list(tmp_path.iterdir())
    prepare(arguments(data_files=[str(corpus[0])], validation_sets=[f"mine={corpus[1]}"]))


def test_tokens_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    np.arange(9, dtype=np.uint16).tofile(tmp_path / "gone.bin")
    (tmp_path / "gone.bin").unlink()
    with pytest.raises(UserError, match=r"gone\.bin cannot be read: No such file"):
        read_header(tmp_path / "gone.bin")

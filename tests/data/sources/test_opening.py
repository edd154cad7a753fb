"""Which files a name means; no document is trained on twice or validated on by a second name."""

from pathlib import Path

import pytest

from gpt2_repro.data.preparation.prepare import prepare
from gpt2_repro.errors import UserError


def test_a_name_with_brackets_is_a_file_and_a_file_by_two_names_is_read_once(
    arguments, corpus: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(corpus[0].parent)
    (tmp_path / "link [1].jsonl").symlink_to(corpus[1])
    names = ["a.jsonl", *map(str, corpus), str(tmp_path / "link [1].jsonl"), f"../{corpus[0].parent.name}/[a].jsonl"]
    assert prepare(arguments("names", data_files=names))["sha256"] == prepare(arguments("once"))["sha256"]
    wanted = prepare(arguments("wanted", data_files=[str(corpus[1])]))["sha256"]
    assert prepare(arguments("link", data_files=[], source=names[3]))["sha256"] == wanted


def test_documents_that_would_be_read_twice_are_refused(arguments, corpus: list[Path], tmp_path: Path) -> None:
    first, second = corpus
    for changes, named in [
        ({"data_files": [], "source": f"{first}=1,{first}=2"}, "a.jsonl"),
        ({"data_files": [], "source": f"{first.parent}/*.jsonl=1,{second}=1"}, "b.jsonl"),
        ({"validation_sets": [f"mine={second}"]}, "b.jsonl"),
    ]:
        with pytest.raises(UserError, match=named):
            prepare(arguments(**changes))
    assert not list(tmp_path.iterdir())
    prepare(arguments("mixture", data_files=[], source=f"{first}=1,{second}=1"))
    prepare(arguments("set", data_files=[str(first)], validation_sets=[f"mine={second}"]))

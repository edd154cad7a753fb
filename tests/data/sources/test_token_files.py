"""Token files of llm.c and nanoGPT are read, and damaged files are refused."""

from pathlib import Path

import numpy as np
import pytest

from gpt2_repro.data.sources.token_files import read_header, separator_shown
from gpt2_repro.errors import UserError
from tests.reference import write_llmc_shard


END = 50256


def test_a_shard_of_llmc_is_read(tmp_path: Path) -> None:
    stream = np.arange(25, dtype=np.uint16)
    assert read_header(write_llmc_shard(tmp_path / "a.bin", stream)).ids().tolist() == stream.tolist()


def header(*words: int) -> bytes:
    return np.array([*words, *[0] * (256 - len(words))], "<i4").tobytes()


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (None, "No such file"),
        (header(20240520, 1, 5) + b"\0" * 8, "1,034"),
        (header(20240520, 2, 5) + b"\0" * 10, "version 1"),
        (header(20240801, 7, 5), "Llama 3"),
        (b"\0\0\0", "3 bytes"),
    ],
)
def test_other_and_damaged_files_are_refused(tmp_path: Path, content: bytes | None, named: str) -> None:
    path = tmp_path / "a.bin"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError) as error:
        read_header(path)
    assert str(path) in str(error.value) and named in str(error.value)


@pytest.mark.parametrize(
    ("ids", "separator", "lengths"),
    [
        ([END, 1, 2, END, END, 3], "before", [3, 1, 2]),
        ([7, 8, END, 1, 2], "before", [2, 3]),
        ([1, 2, END, END, 3], "after", [3, 1, 1]),
        ([1, 2, END], "after", [3]),
        ([1, 2, 3], "none", [3]),
        ([1, 2, 3], "before", [3]),
    ],
)
def test_documents_are_found_by_their_separators(
    tmp_path: Path, ids: list[int], separator: str, lengths: list[int]
) -> None:
    np.array(ids, np.uint16).tofile(tmp_path / "a.bin")
    part = read_header(tmp_path / "a.bin")
    assert part.ids().tolist() == ids
    assert part.lengths(None if separator == "none" else END, separator).tolist() == lengths
    shown = separator_shown(part, part, END)
    assert shown == {END: "before"}.get(ids[0], "after" if ids[-1] == END else None)

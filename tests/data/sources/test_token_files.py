"""Token files of llm.c and nanoGPT are read, and damaged files are refused."""

import contextlib
import dataclasses
import gzip
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from gpt2_repro.data.arguments import DataArguments, PreparationOptions
from gpt2_repro.data.preparation.prepare import prepare
from gpt2_repro.data.preparation.staging import Limit, StagedPart, stage_part
from gpt2_repro.data.sources.token_files import read_header, separator_shown
from gpt2_repro.data.tokenizer import obtain_tokenizer
from gpt2_repro.errors import UserError
from tests.reference import write_jsonl


END = 50256


def header(*words: int) -> bytes:
    return np.array([*words, *[0] * (256 - len(words))], "<i4").tobytes()


@pytest.mark.parametrize(
    "content",
    [
        header(20240520, 1, 5) + b"\0" * 8,
        header(20240520, 2, 5) + b"\0" * 10,
        header(20240801, 7, 5) + b"\0" * 20,
        header(20260801, 1, 5) + b"\0" * 10,  # another magic number, with ids of 2 and 4 bytes
        header(7, 1, 5) + b"\0" * 20,
        b"\x93NUMPY\1\0" + b"\0" * 120,
        b"LITPKDS" + (1).to_bytes(8, "little") + b"\x08" + (50).to_bytes(8, "little") + b"\1\0" * 50,  # TinyLlama
        np.array([2, 16, 36, 56, *range(10)], "<u4").tobytes(),  # litdata: samples and their places
        *(struct.pack(form, 300) + b"\5\0" * 300 for form in ("<I", "<Q", "<4xQ", "<8xI20x", "<4xI248x")),
        struct.pack("<Q", 600) + b"\5\0" * 300,  # the number of bytes
        struct.pack("<Q", 60) + b'{"ids":{"dtype":"U16"' + b" " * 39 + b"\5\0" * 300,  # safetensors
        *(gzip.compress(b"ids" * 9, mtime=0), pickle.dumps([1, 2]), pickle.dumps([1, 2], 2), b"PK\3\4" + b"\0" * 20),
        b"PAR1\x15\4" + b"\0" * 20,
        b"\0\0\0",
    ],
)
def test_other_and_damaged_files_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(content)
    with pytest.raises(UserError, match=str(path)):
        read_header(path)


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


CHARACTERS = np.random.default_rng(0).integers(0, 65, 5000)  # ids like those of nanoGPT's shakespeare_char


@pytest.mark.parametrize(
    ("content", "vocab_size", "named"),
    [
        *((CHARACTERS.astype(kind).tobytes(), 65, "more than 16 bits") for kind in ("<i4", "<i8", ">i4", "<u4")),
        ((CHARACTERS * 1900).astype("<u4").tobytes(), 128_256, "16 bits"),
        *((CHARACTERS.astype(kind).tobytes(), 65, "floats") for kind in ("<f2", "<f4", "<f8")),
        ((CHARACTERS * 700).astype("<f4").tobytes(), 50_257, "floats"),
        (CHARACTERS.astype("u1").tobytes(), 50_257, "8 bits"),
        (CHARACTERS.astype("<u2").tobytes(), 50_257, "below 65,"),
        (CHARACTERS.astype("<u2").tobytes(), 65, None),
        ((CHARACTERS % 4).astype("<u2").tobytes(), 5, None),
        (CHARACTERS[:100].astype("<i4").tobytes()[:400], 50_257, None),  # too few to judge
        ((CHARACTERS % 10 + 15).astype("<u2").tobytes(), 50_257, None),  # digits
    ],
)
def test_ids_of_another_width_or_vocabulary_are_refused(
    tmp_path: Path, content: bytes, vocab_size: int, named: str | None
) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(content)
    part = read_header(path)
    with pytest.raises(UserError, match=f"{path} .*{named}") if named else contextlib.nullcontext():
        part.check(vocab_size)


@pytest.mark.parametrize(
    ("ids", "kind", "named"),
    [
        *((CHARACTERS, kind, "more than 16 bits") for kind in ("<i4", "<i8", ">i4", ">i8", "<u4")),
        *((CHARACTERS * 900, kind, "more than 16 bits") for kind in ("<i4", "<i8")),
        (CHARACTERS, ">u2", "the id 16384"),
        (CHARACTERS * 900, "<u2", None),
        (np.append(CHARACTERS, 60_000), "<u2", "the id 60000"),
        (np.stack([CHARACTERS * 900, CHARACTERS % 4], 1), "<u2", None),  # pairs of a place and an event
        (np.zeros(5000), "<u2", None),
        *((CHARACTERS * 900, kind, "floats") for kind in ("<f2", "<f4", "<f8")),
        (CHARACTERS + 29_900, "<u2", None),  # also whole numbers if read as float16
    ],
)
def test_ids_without_text_are_checked(tmp_path: Path, ids: np.ndarray, kind: str, named: str | None) -> None:
    path = tmp_path / "a.bin"
    ids.astype(kind).tofile(path)
    vocab_size = 65 if kind == ">u2" else 60_000
    with pytest.raises(UserError, match=f"{path} .*{named}") if named else contextlib.nullcontext():
        read_header(path).check(vocab_size, is_text=False)


GPT2_LIKE = np.minimum(np.random.default_rng(0).zipf(1.3, 30_000), 50_255)


@pytest.mark.parametrize(
    "ids",
    [
        [*range(1, 13), *[0] * 500, *GPT2_LIKE],  # a header
        [*GPT2_LIKE, *[END] * 5000],  # an end that was not filled
        [*GPT2_LIKE, *[0] * 5000],
        [*GPT2_LIKE, *[END, END, 0] * 700],
        [*GPT2_LIKE, *[END, *range(15)] * 100],
        [*GPT2_LIKE, *[END] * 5000, *GPT2_LIKE],
        [*GPT2_LIKE, *[0] * 5000, *GPT2_LIKE],
        [*GPT2_LIKE, *[5, 6, *[END] * 400] * 5, *GPT2_LIKE],  # documents that are filled to the same length
        [*GPT2_LIKE, 50_257],
    ],
)
@pytest.mark.parametrize("separator", ["before", "after"])
def test_what_no_text_has_is_refused(tmp_path: Path, ids: list[int], separator: str) -> None:
    path = tmp_path / "a.bin"
    for content, is_wrong in ((ids, True), ([*GPT2_LIKE, *[5, 6, END, END] * 5000, 7], False)):
        np.array(content, np.uint16).tofile(path)
        with pytest.raises(UserError, match=str(path)) if is_wrong else contextlib.nullcontext():
            read_header(path).check(50_257)
            read_header(path).lengths(END, separator)


def test_a_wrong_token_file_leaves_nothing(arguments, tmp_path: Path) -> None:
    """Also if other files are right, and if the file is a validation file or set."""
    ids = np.random.default_rng(1).integers(0, 60_000, 4000)
    for name, kind in (("a", "<u2"), ("b", "<i8"), ("b_val", "<i8")):
        ids.astype(kind).tofile(tmp_path / f"{name}.bin")
    a, b, b_val = (str(tmp_path / f"{name}.bin") for name in ("a", "b", "b_val"))
    words = {"tokenizer": "none:60000", "separator": "none"}
    for changes in (
        {"data_files": [a, b]},
        {"data_files": [a, b_val], "split": "source"},
        {"data_files": [a], "validation_sets": [f"other={b}"]},
    ):
        with pytest.raises(UserError, match=r"b\w*\.bin has integers of more than 16 bits"):
            prepare(arguments("rows", **words | changes))
        assert not list(tmp_path.glob("rows*"))
    assert prepare(arguments("rows", **words, data_files=[a])).manifest.read.documents == 1


def test_a_folder_of_token_files_is_read(arguments, tmp_path: Path) -> None:
    """Also with the description of the data next to them. Next to texts, .bin files are something else."""
    shards = tmp_path / "shards"
    shards.mkdir()
    for name in ("a", "b"):
        np.random.default_rng(1).integers(0, 60_000, 4000).astype("<u2").tofile(shards / f"{name}.bin")
    words = {"tokenizer": "none:60000", "separator": "none"}
    wanted = prepare(arguments("glob", **words, data_files=[str(shards / "*.bin")])).manifest
    assert prepare(arguments("folder", **words, data_files=[str(shards)])).manifest.sha256 == wanted.sha256
    (shards / "README.md").write_text("Shards of tokens.", encoding="utf-8")
    assert prepare(arguments("described", **words, data_files=[str(shards)])).manifest.sha256 == wanted.sha256
    text = write_jsonl(shards / "text.jsonl", ["one two three " * 300])
    described = prepare(arguments("texts", data_files=[str(shards)])).manifest.source["files"]
    assert [file["path"] for file in described] == [text]


def test_ids_of_gpt2_are_accepted(real_data: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(real_data / "gpt2" / "tokenizer.json"))
    text = (real_data / "tinyshakespeare" / "input.txt").read_text(encoding="utf-8")
    sums = "".join(f"{a}+{b}={a + b}\n" for a in range(60) for b in range(60))
    for content in (text[:300_000], text[:1000], "one two " * 400 + text[:50], sums, "а б в г д е\n" * 500 + sums):
        np.array(tokenizer.encode(content).ids, np.uint16).tofile(tmp_path / "a.bin")
        read_header(tmp_path / "a.bin").check(50_257)


def test_token_files_without_end_of_text_ids_are_announced(real_data: Path, tmp_path: Path, caplog) -> None:
    ids = np.random.default_rng(1).integers(0, 32_000, 20_000).astype(np.uint16)
    for name, first in (("none", 7), ("some", 50_256)):
        ids[0] = first
        ids.tofile(tmp_path / f"{name}.bin")
        words = {"sequence_length": 8, "validation_tokens": 100, "dataset_dir": str(tmp_path / name)}
        prepare(DataArguments(data_files=[str(tmp_path / f"{name}.bin")], tokenizer=str(real_data / "gpt2"), **words))
        assert ("another tokenizer" in caplog.text) == (name == "none")
        caplog.clear()


def test_a_document_of_more_than_4_billion_tokens_keeps_its_length(tmp_path: Path, arguments) -> None:
    """A .bin file without separators is one document."""
    tokens = 2**32 + 10
    with (tmp_path / "a.bin").open("wb") as file:
        file.truncate(2 * tokens)  # takes no space on disk
    args = dataclasses.replace(arguments(), separator="none", tokenizer="none:40")
    obtain_tokenizer(args, tmp_path / "tokenizer", list, 0)
    stem = tmp_path / "0"
    options = {"staging": tmp_path, "args": args, "options": PreparationOptions(), "limit": Limit(np.inf, False)}
    stage_part(read_header(tmp_path / "a.bin"), stem, **options)
    assert StagedPart(stem, None, 0, 0, None, None).lengths().tolist() == [tokens]

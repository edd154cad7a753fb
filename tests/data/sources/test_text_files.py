"""Text files give the same documents for any size of the parts that workers read."""

import gzip
import io
import json
import os
import tracemalloc
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest

from gpt2_repro.data.sources import local_files, text_files
from gpt2_repro.data.sources.base import TextForm
from gpt2_repro.data.sources.local_files import LocalFile
from gpt2_repro.data.sources.text_files import TextPart
from gpt2_repro.errors import UserError


TEXTS = ["one\ntwo", "", "naïve 日本語 🙂", 'with "quotes", commas', "x" * 500, "spelled <|endoftext|> out", "last"]


def zstd(content: bytes) -> bytes:
    return pa.compress(content, "zstd", asbytes=True)


def jsonl(texts: list[str]) -> bytes:
    return "".join(json.dumps({"text": text, "id": 1}) + "\n" for text in texts).encode()


def csv_of(texts: list[str]) -> bytes:
    quoted = ('"' + text.replace('"', '""') + '"' for text in texts)
    return ("\ufeffid,text\n" + "".join(f"1,{text}\n" for text in quoted)).encode()


def parquet(texts: list[str | None] | pa.Array, kind: pa.DataType | None = None, name: str = "text") -> bytes:
    sink = io.BytesIO()
    column = texts if isinstance(texts, pa.Array) else pa.array(texts, kind or pa.string())
    table = pa.table({"id": list(range(len(texts))), "meta": [{"a": 1}] * len(texts), name: column})
    pyarrow.parquet.write_table(table, sink, row_group_size=2)
    return sink.getvalue()


def read(path: Path, form: TextForm | None = None) -> tuple[list[str], list[str]]:
    """Return the documents of a file, and the errors of its bad rows."""
    file = LocalFile(str(path), path.stat().st_size, form or TextForm())
    parts = file.parts()
    assert abs(sum(part.size for part in parts) - file.size) < len(parts)
    batches = [batch for part in parts for batch in part.read()]
    return [text for batch in batches for text in batch.documents], [line for batch in batches for line in batch.bad]


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part_bytes: int, name: str, content: bytes) -> Path:
    """Return a file that is divided into parts of `part_bytes`."""
    monkeypatch.setattr(local_files, "PART_BYTES", part_bytes)
    (tmp_path / name).write_bytes(content)
    return tmp_path / name


TEXT = "one\ntwo\n\n\nthr\0ee\n\nfour"  # NUL is text
MARKED = f"\ufeff{TEXT}".encode()  # a byte order mark is not text


@pytest.mark.parametrize("part_bytes", [1, 7, 40, 2**26])
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", jsonl(TEXTS)),
        ("a.jsonl", text_files.BYTE_ORDER_MARK + b"\n" + jsonl(TEXTS).replace(b"\n", b"\n\n").replace(b"\n", b"\r\n")),
        ("a.jsonl.gz", gzip.compress(jsonl(TEXTS[:3]), mtime=0) + gzip.compress(jsonl(TEXTS[3:]), mtime=0)),
        ("a.jsonl.zst", zstd(jsonl(TEXTS[:3])) + zstd(jsonl(TEXTS[3:]))),
        ("a.csv.gz", gzip.compress(csv_of(TEXTS).replace(b"id,text", b"id, text "), mtime=0)),
        ("a.parquet", parquet([text or None for text in TEXTS], pa.large_string())),
        ("a.parquet", parquet([*TEXTS], pa.string_view())),
        ("a.parquet", parquet([*TEXTS], pa.dictionary(pa.int32(), pa.string()))),
        ("a.txt", MARKED),
        ("a.txt.gz", gzip.compress(MARKED, mtime=0)),
    ],
)
def test_every_kind_gives_the_same_documents_in_any_parts(path: Path, name: str) -> None:
    assert read(path) == ([TEXT] if ".txt" in name else TEXTS, [])


BAD_LINES = [
    *(b'{"text": "good"}', b"", b'{"body": "y"}', b'{"text": 5}', b"not json", b'{"text": null}', b'{"text": "\xff"}'),
    *(b'{"text": "half \\ud83d"}', b'{"text": "\\ud83d\\ude42"}', b"[1]", b'{"text": "\xed\xa0\xbd"}'),
    b'{"text": ' + 100_000 * b"[",
]
BAD_ARRAY = b'["one", "half \\ud83d", {"text": "\\udc00"}, {"text": 5}, "\\ud83d\\ude42"]'
BAD_TEXT = b"good\nna\xefve\nfine"
BAD_CSV = b'id,text\n1,"two\nlines"\n2,na\xefve\n3\n4,\n5,fine\n6,one,two\n'
BAD_STRINGS = pa.Array.from_buffers(pa.string(), 3, pa.array([b"ab", b"c\xff", b"d"], pa.binary()).buffers())


@pytest.mark.parametrize("part_bytes", [40, 2**26])
@pytest.mark.parametrize(
    ("name", "content", "documents", "places"),
    [
        ("a.jsonl", b"\n".join(BAD_LINES), ["good", "", "🙂"], [f"line {n}," for n in (3, 4, 5, 7, 8, 10, 11, 12)]),
        ("a.json", text_files.BYTE_ORDER_MARK + BAD_ARRAY, ["one", "🙂"], ["item 2,", "item 3,", "item 4,"]),
        ("a.txt", BAD_TEXT, [], ["position 7"]),
        ("a.csv", BAD_CSV, ["two\nlines", "", "fine"], ["line 4,", "line 5,", "line 8,"]),
        ("a.parquet", parquet(BAD_STRINGS), ["ab", "d"], ["row 2,"]),
    ],
)
def test_bad_rows_are_named(path: Path, documents: list[str], places: list[str]) -> None:
    found, bad = read(path)
    assert found == documents
    for line, place in zip(bad, places, strict=True):
        assert line.startswith(str(path)) and place in line


@pytest.mark.parametrize("name", ["a.txt", "a.csv", "a.jsonl", "a.parquet"])
@pytest.mark.parametrize("verbatim", [False, True])
def test_line_breaks_of_windows_are_converted_except_in_parquet_and_on_the_hub(
    tmp_path: Path, name: str, verbatim: bool
) -> None:
    text = "one\r\ntwo\rthree"
    path = tmp_path / name
    content = {".csv": csv_of([text]), ".jsonl": jsonl([text]), ".parquet": parquet([text])}
    path.write_bytes(content.get(path.suffix, text.encode()))
    unchanged = path.suffix == ".parquet" or (verbatim and path.suffix != ".txt")
    wanted = text if unchanged else "one\ntwo\rthree"
    assert read(path, TextForm(verbatim=verbatim)) == ([wanted], [])


def test_binary_files_are_not_read(tmp_path: Path) -> None:
    text = "Жили-были дед да баба.\n" * 99
    elf = b"\x7fELF\2\1\1\0\0\0\0\0\3\0\x3e\0\n\x90\xff\xfe\xe8\nname\n" * 9
    for content in (text.encode("utf-16-be"), "One.\n".encode("utf-16-le") * 99, elf, gzip.compress(b"one\n")):
        path = tmp_path / "a.txt"
        path.write_bytes(content)
        documents, bad = read(path)
        assert documents == [] and len(bad) == 1 and str(path) in bad[0]


CSV = b'id,text\n1,"one"\n2,"two'


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("a.txt.gz", b"no gzip at all", ""),
        ("a.jsonl.gz", gzip.compress(jsonl(TEXTS * 200), mtime=0)[:-20], ""),
        ("a.jsonl.zst", zstd(jsonl(TEXTS * 200))[:-20], ""),
        (os.fsdecode(b"\xff.jsonl.gz"), gzip.compress(jsonl(TEXTS), mtime=0), ""),  # a name that Arrow cannot open
        ("a.json", b'["half \xed\xa0\xbd"]', ""),
        ("a.parquet", parquet([*TEXTS])[:-20], ""),
        ("a.parquet", parquet([*TEXTS], name="body"), "--text_column"),
        ("a.csv", b"body,title\n1,2\n", "--text_column"),
        ("a.csv", b"text,text\n1,2\n", "has 2 columns"),
        # Without an error, an unclosed quote would include the rows after it: 20,000 rows became 12,001 documents.
        ("a.csv", CSV + b"\n" + b"3,three\n" * 1000, "line 3,"),
        ("a.csv", CSV + b"x" * 5000 + b'"\n', "line 3,"),
        ("a.txt", b"x" * 4001, ".jsonl"),
        ("a.jsonl", jsonl(["short", "x" * 4001]), "line 2"),
    ],
)
def test_files_that_cannot_be_read_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: bytes, named: str
) -> None:
    monkeypatch.setattr(text_files, "LONGEST_DOCUMENT", 4000)
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UserError) as error:
        read(path)
    assert str(path) in str(error.value) and named in str(error.value)


def test_a_part_inside_a_long_line_does_not_hold_it(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(2**25 * b"x" + b'\n"next"')
    part = TextPart(str(path), ".jsonl", TextForm(), start=10, stop=2**25 + 5, size=2**25)
    tracemalloc.start()
    assert [batch.documents for batch in part.read()] == [["next"]]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**23

"""Documents of every kind of file, whatever the parts; what cannot be read is named with its row."""

import gzip
import io
import json
import os
import tracemalloc
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest

from gpt2_repro.data.sources import text_files
from gpt2_repro.data.sources.text_files import TextFile, TextForm, TextPart
from gpt2_repro.errors import UserError


TEXTS = ["one\ntwo", "", "naïve 日本語 🙂", 'with "quotes", commas', "x" * 500, "spelled <|endoftext|> out", "last"]


def zstd(content: bytes) -> bytes:
    return pa.compress(content, "zstd", asbytes=True)


def jsonl(texts: list[str]) -> bytes:
    return "".join(json.dumps({"text": text, "id": 1}) + "\n" for text in texts).encode()


def csv_of(texts: list[str]) -> bytes:
    quoted = ('"' + text.replace('"', '""') + '"' for text in texts)
    return ("\ufeffid,text\n" + "".join(f"1,{text}\n" for text in quoted)).encode()


def parquet(texts: list[str | None], kind: pa.DataType | None = None, name: str = "text") -> bytes:
    sink = io.BytesIO()
    column = pa.array(texts, kind or pa.string())
    table = pa.table({"id": list(range(len(texts))), "meta": [{"a": 1}] * len(texts), name: column})
    pyarrow.parquet.write_table(table, sink, row_group_size=2)
    return sink.getvalue()


def read(path: Path, form: TextForm | None = None) -> tuple[list[str], list[str]]:
    """All documents and what was bad, part by part; the parts are as large as the file."""
    file = TextFile(str(path), path.stat().st_size, form or TextForm())
    parts = file.parts()
    assert abs(sum(part.size for part in parts) - file.size) < len(parts)
    batches = [batch for part in parts for batch in part.read()]
    return [text for batch in batches for text in batch.documents], [line for batch in batches for line in batch.bad]


@pytest.mark.parametrize("part_bytes", [1, 40, 2**26])
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", jsonl(TEXTS)),
        ("a.jsonl", jsonl(TEXTS).removesuffix(b"\n")),
        ("a.jsonl", jsonl(TEXTS).replace(b"\n", b"\n\n").replace(b"\n", b"\r\n")),
        ("a.jsonl.gz", gzip.compress(jsonl(TEXTS[:3]), mtime=0) + gzip.compress(jsonl(TEXTS[3:]), mtime=0)),
        ("a.jsonl.zst", zstd(jsonl(TEXTS[:3])) + zstd(jsonl(TEXTS[3:]))),
        ("a.csv", csv_of(TEXTS)),
        ("a.csv.gz", gzip.compress(csv_of(TEXTS), mtime=0)),
        ("a.parquet", parquet([*TEXTS])),
        ("a.parquet", parquet([text or None for text in TEXTS], pa.large_string())),
        ("a.parquet", parquet([*TEXTS], pa.dictionary(pa.int32(), pa.string()))),
    ],
)
def test_every_kind_gives_the_same_documents_in_any_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part_bytes: int, name: str, content: bytes
) -> None:
    monkeypatch.setattr(text_files, "PART_BYTES", part_bytes)
    path = tmp_path / name
    path.write_bytes(content)
    assert read(path) == (TEXTS, [])


@pytest.mark.parametrize("part_bytes", [1, 7, 2**26])
def test_a_text_file_is_a_document_or_its_lines_or_paragraphs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part_bytes: int
) -> None:
    monkeypatch.setattr(text_files, "PART_BYTES", part_bytes)
    path = tmp_path / "a.txt"
    path.write_text("one\ntwo\n\n\nthree\n\nfour")
    assert read(path) == ([path.read_text()], [])
    assert read(path, TextForm(sample_by="line")) == (["one", "two", "", "", "three", "", "four"], [])
    assert read(path, TextForm(sample_by="paragraph")) == (["one\ntwo", "three", "four"], [])


def test_rows_of_a_page_are_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_files, "PART_BYTES", 1)
    rows = ["", " = One = \n", "", " text . \n", " = = Part = = \n", " more = \n", " = Two = \n", " = 2 \n"]
    path = tmp_path / "a.parquet"
    path.write_bytes(parquet([*rows]))
    assert read(path, TextForm(first_row=" = "))[0] == ["", "".join(rows[1:6]), "".join(rows[6:])]


@pytest.mark.parametrize("part_bytes", [40, 2**26])
def test_bad_rows_are_named_with_their_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part_bytes: int) -> None:
    monkeypatch.setattr(text_files, "PART_BYTES", part_bytes)
    path = tmp_path / "a.jsonl"
    lines = [
        b'{"text": "good"}',
        b"",
        b'{"body": "y"}',
        b'{"text": 5}',
        b"not json",
        b'{"text": null}',
        b'{"text": "\xff"}',
        b'{"text": "half \\ud83d"}',
        b'{"text": "whole \\ud83d\\ude42"}',
        b"[1]",
        b'{"text": "\xed\xa0\xbd"}',
        b'{"text": ' + 100_000 * b"[",
    ]
    path.write_bytes(b"\n".join(lines))
    documents, bad = read(path)
    assert documents == ["good", "", "whole 🙂"]
    no_object = "is no JSON object with a text under the key `text`"
    wrong = {
        3: no_object,
        4: no_object,
        5: no_object,
        7: "is no valid Unicode",
        8: "is no valid Unicode",
        10: no_object,
        11: "is no valid Unicode",
        12: no_object,
    }
    assert bad == [f"{path}, line {number}, {what}" for number, what in wrong.items()]


def test_bad_rows_of_the_other_kinds(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("good\nnaïve\nfine".encode("latin-1"))
    assert read(path) == ([], [f"{path} is no valid UTF-8 at byte 7"])
    assert read(path, TextForm(sample_by="line")) == (["good", "fine"], [f"{path}, line 2, is no valid UTF-8"])
    path = tmp_path / "a.csv"
    path.write_bytes(
        'id,text\n1,"two\nlines"\n2,naïve\n3\n4,\n5,日本\n6,one,two\n'.encode().replace("ï".encode(), b"\xef")
    )
    wrong = {4: "is no valid UTF-8", 5: "has too few fields", 8: "has too many fields"}
    assert read(path) == (["two\nlines", "", "日本"], [f"{path}, line {n}, {what}" for n, what in wrong.items()])
    path = tmp_path / "a.parquet"
    invalid = pa.Array.from_buffers(pa.string(), 3, pa.array([b"ab", b"c\xff", b"d"], pa.binary()).buffers())
    pyarrow.parquet.write_table(pa.table({"text": invalid}), path)
    assert read(path) == (["ab", "d"], [f"{path}, row 2, is no valid UTF-8"])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt.gz", b"no gzip at all", "cannot be read: zlib inflate failed"),
        ("a.jsonl.gz", gzip.compress(jsonl(TEXTS * 200), mtime=0)[:-20], "cannot be read: Truncated"),
        ("a.jsonl.zst", zstd(jsonl(TEXTS * 200))[:-20], "cannot be read: Truncated"),
        ("a.csv.gz", gzip.compress(csv_of(TEXTS * 200), mtime=0)[:-20], "cannot be read: Truncated"),
        ("a.csv", b"body,title\n1,2\n", "has no text column `text`. Pass --text_column with one of: body, title"),
        ("a.parquet", b"PAR1 and nothing else", "cannot be read"),
        ("a.parquet", parquet([*TEXTS])[:-20], "cannot be read"),
        (
            "a.parquet",
            parquet([*TEXTS], name="body"),
            "has no text column `text`: it has id, meta, body; name one with",
        ),
    ],
)
def test_files_that_cannot_be_read_are_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UserError) as error:
        read(path)
    assert str(error.value).startswith(f"{path} {message}")


def test_a_name_that_arrow_cannot_open_is_a_line(tmp_path: Path) -> None:
    path = Path(os.fsdecode(bytes(tmp_path) + b"/\xff.jsonl.gz"))
    path.write_bytes(gzip.compress(jsonl(TEXTS)))
    with pytest.raises(UserError, match="cannot be read: 'utf-8' codec can't encode"):
        read(path)


def test_the_text_column_has_a_name(tmp_path: Path) -> None:
    for name, content in [
        ("a.jsonl", jsonl(TEXTS).replace(b'"text"', b'"body"')),
        ("a.csv", csv_of(TEXTS).replace(b"id,text", b"id,body")),
        ("a.parquet", parquet([*TEXTS], name="body")),
    ]:
        path = tmp_path / name
        path.write_bytes(content)
        assert read(path, TextForm(text_column="body")) == (TEXTS, [])


def test_a_document_that_would_not_fit_into_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_files, "LONGEST_DOCUMENT", 100)
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(b"x" * 101))
    with pytest.raises(UserError, match="is one document of more than 100 bytes: cut it with --sample_by paragraph"):
        read(path)
    path = tmp_path / "a.jsonl"
    path.write_bytes(jsonl(["short", "x" * 101]))
    with pytest.raises(UserError, match="line 2, is longer than 100 bytes"):
        read(path)
    path = tmp_path / "b.txt"
    path.write_bytes(b"short\n\n" + 30 * b"line\n")
    with pytest.raises(UserError, match="line 3, begins a paragraph of more than 100 bytes"):
        read(path, TextForm(sample_by="paragraph"))


def test_a_part_inside_a_long_line_does_not_hold_it(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(2**25 * b"x" + b"\nnext")
    size = path.stat().st_size
    tracemalloc.start()
    batches = list(TextPart(str(path), TextForm(sample_by="line"), 10, size, size - 10).read())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [batch.documents for batch in batches] == [["next"]]
    assert peak < 2**23


@pytest.mark.parametrize(
    ("content", "place"),
    [
        ('id,text\n1,one\n2,"two\n' + "3,three\n" * 1000, "row 2 (line 3)"),
        ('id,text\n1,"one"\n2,"two\n3,"three"\n', "row 2 (line 3)"),
        ("id,text,text\n1,one,two\n", "`text` 2 times"),
        ('id,text\n1,"' + "x" * 5000 + '"\n', "row 1 (line 2)"),
    ],
)
def test_a_csv_that_would_lose_text_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str, place: str
) -> None:
    """An unclosed quote swallows the rows after it: 20,000 rows once became 12,001 documents."""
    monkeypatch.setattr(text_files, "LONGEST_DOCUMENT", 4000)
    path = tmp_path / "a.csv"
    path.write_text(content)
    with pytest.raises(UserError) as raised:
        read(path)
    assert str(path) in str(raised.value) and place in str(raised.value)


@pytest.mark.parametrize("sample_by", ["document", "line", "paragraph"])
@pytest.mark.parametrize("suffix", [".txt", ".txt.gz"])
def test_a_byte_order_mark_is_not_text(tmp_path: Path, sample_by: str, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    content = "\ufefffirst".encode()
    path.write_bytes(gzip.compress(content) if suffix.endswith("gz") else content)
    assert read(path, TextForm(sample_by=sample_by)) == (["first"], [])

"""n-grams found in rows equal those of naive sets over the documents, whatever the packing and the blocks."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from gpt2_repro.data import overlap
from gpt2_repro.data.overlap import EvaluationNgrams, N, check_files, evaluation_texts, ngram_hashes
from gpt2_repro.data.packing import pack_rows, pack_windows
from gpt2_repro.data.rows import Block
from gpt2_repro.errors import UserError


END = 999


def to_ids(texts: list[str]) -> list[np.ndarray]:
    """Ids spelled in a text."""
    return [np.array(text.split(), dtype=np.uint16) for text in texts]


def spell(ids: np.ndarray) -> str:
    return " ".join(map(str, ids.tolist()))


def naive_ngrams(ids: np.ndarray) -> set[tuple[int, ...]]:
    return {tuple(ids[place : place + N].tolist()) for place in range(len(ids) - N + 1)}


def in_blocks(ids: np.ndarray, lengths: np.ndarray, source: np.random.Generator) -> Iterator[Block]:
    """The same rows in blocks of 0 to 5."""
    row = start = 0
    while row < len(lengths):
        part = lengths[row : row + int(source.integers(0, 6))]
        yield ids[start : start + part.sum()], part
        row, start = row + len(part), start + int(part.sum())


def glue(rows: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([rows[0], *(row[1:] for row in rows[1:])]) if rows else np.empty(0, np.uint16)


def packed(
    documents: list[np.ndarray], packing: str, length: int, min_length: int
) -> tuple[np.ndarray, np.ndarray, set]:
    """Ids and lengths of the rows, and the n-grams of what the rows keep of each document (wrap) or the stream."""
    if packing == "concat":
        rows = [row for block in pack_rows(documents, length) for row in block]
        kept = [glue(rows)]
    else:
        kept, rows = [], []
        for document in documents:
            pieces = [(document, np.array([len(document)]))]
            blocks = list(pack_windows(pieces, length, min_length=min_length))
            of_document = [row for ids, ends in blocks for row in np.split(ids, np.cumsum(ends))[:-1]]
            kept.append(glue(of_document))
            rows += of_document
    return np.concatenate(rows), np.array([len(row) for row in rows]), set().union(*map(naive_ngrams, kept))


@pytest.mark.parametrize("separator", ["before", "after", "none"])
@pytest.mark.parametrize(
    ("packing", "length", "min_length"),
    [("concat", 20, 0), ("wrap", 20, 0), ("wrap", 20, 7), ("concat", 5, 0), ("wrap", 5, 2)],
)
def test_equal_to_naive_sets(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    packing: str,
    length: int,
    min_length: int,
    separator: str,
    seed: int,
) -> None:
    source = np.random.default_rng(seed)
    monkeypatch.setattr(overlap, "_STEP", source.choice([1, 40, 2**15]))
    documents = []
    full = False  # whether the last row so far is, so that only its last id and the next one tell documents apart
    for number in range(60):
        # Few different ids, so that rows of different documents often meet in the same one; many that fill rows.
        ids = source.integers(0, 3, source.choice([0, 1, 5, 12, 13, 14, 19, 20, 21, 40, 41, 60, 90])).astype(np.uint16)
        if full and separator != "before":
            ids[:1] = 100 + number
        end = np.array([END] if len(ids) else [], np.uint16)
        documents.append(np.concatenate({"before": [end, ids], "after": [ids, end], "none": [ids]}[separator]))
        if (targets := len(documents[-1]) - 1) >= max(1, min_length):
            full = targets >= length and targets % length < max(1, min_length)
    ids, lengths, trained = packed(documents, packing, length, min_length)

    # Texts over the borders of documents too, with and without an id that two rows may share.
    texts = [np.concatenate(documents), glue(np.split(ids, np.cumsum(lengths))[:-1])]
    cuts = [text[place : place + int(source.integers(0, 60))] for text in texts for place in range(0, len(text), 17)]
    items = [[spell(part[part != END]) for part in cuts[first : first + 1 + first % 3]] for first in range(len(cuts))]
    items.append([spell(source.integers(0, 3, 200))])
    path = tmp_path / "items.jsonl"
    path.write_text("".join(json.dumps({"parts": item}) + "\n" for item in items))

    of_items = [set().union(*map(naive_ngrams, to_ids(item))) for item in items]
    overlapping = [number for number, ngrams in enumerate(of_items, 1) if ngrams & trained]
    different = set().union(*of_items)
    (found,) = EvaluationNgrams([path], to_ids).found_in(in_blocks(ids, lengths, source), row_length=length + 1)
    assert 0 < len(different & trained) < len(different)
    assert (found["ngrams"], found["ngrams_found"]) == (len(different), len(different & trained))
    assert (found["items"], found["items_with_overlap"]) == (len(items), len(overlapping))
    assert found["items_too_short"] == sum(not ngrams for ngrams in of_items)
    assert found["first_items_with_overlap"] == overlapping[:10]


def test_files_are_counted_apart(tmp_path: Path) -> None:
    trained, other = np.arange(30, dtype=np.uint16), np.arange(100, 140, dtype=np.uint16)
    (tmp_path / "a.txt").write_text(spell(trained[:14]))
    lines = [{"text": spell(other)}, {"text": spell(trained[:13]), "more": [[spell(trained[2:15])]]}, {"label": 1}]
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as file:
        file.write("\n\n".join(map(json.dumps, lines)))
    ngrams = EvaluationNgrams([tmp_path / "a.txt", tmp_path / "b.jsonl.gz"], to_ids)
    first, second = ngrams.found_in([(trained, np.array([30]))], row_length=30)
    assert (first["file"], first["items"], first["ngrams"], first["ngrams_found"]) == ("a.txt", 1, 2, 2)
    assert (second["items"], second["items_too_short"], second["items_with_overlap"]) == (3, 1, 1)
    assert (second["ngrams"], second["ngrams_found"], second["first_items_with_overlap"]) == (28 + 2, 2, [3])
    assert first["sha256"] != second["sha256"] and len(first["sha256"]) == 64
    nothing = ngrams.found_in([], row_length=30)
    assert [found["ngrams_found"] for found in nothing] == [0, 0]


def test_hashes_are_spread() -> None:
    hashes = ngram_hashes(np.random.default_rng(0).integers(0, 2**16, 50_000, dtype=np.uint16))
    # 50,000 of 2**32 values: 0.3 pairs by chance in each half.
    for half in (hashes >> np.uint64(32), hashes & np.uint64(2**32 - 1)):
        assert len(np.unique(half)) > len(half) - 5


def test_texts_of_a_line_are_all_its_strings(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    item = {"ctx": "a", "label": 3, "endings": ["b", ["c", {"deep": "d"}]], "none": None}
    path.write_text(json.dumps(item) + "\n \n" + json.dumps(["e"]) + "\n")
    assert list(evaluation_texts(path)) == [(1, ["a", "b", "c", "d"]), (3, ["e"])]


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("a.csv", b"a,b", ""),
        ("gone.jsonl", None, ""),
        ("a.jsonl", b'{"text": "a"}\n{"text": "b\n', "line 2"),
        ("a.txt", b"\xff", ""),
        ("a.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 9, mtime=0)[:-10], "line "),
        ("a.jsonl", b"\n", ""),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, name: str, content: bytes | None, line: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=f"{name}.*{line}"):
        check_files([str(tmp_path / name)])
        EvaluationNgrams([tmp_path / name], to_ids)

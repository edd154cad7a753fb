"""n-grams found in rows equal those of naive sets over the documents, whatever the packing and the blocks."""

import gzip
import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from gpt2_repro.data import overlap
from gpt2_repro.data.overlap import N, check_files, find_overlap, ngram_hashes
from gpt2_repro.errors import UserError


END = 999


def to_ids(texts: list[str]) -> list[np.ndarray]:
    """Ids spelled in a text."""
    return [np.array(text.split(), dtype=np.uint16) for text in texts]


def spell(ids: np.ndarray) -> str:
    return " ".join(map(str, ids.tolist()))


def naive_ngrams(ids: np.ndarray) -> set[tuple[int, ...]]:
    return {tuple(ids[place : place + N].tolist()) for place in range(len(ids) - N + 1)}


@pytest.mark.parametrize(
    ("packing", "length", "min_length", "separator"),
    [
        ("concat", 20, 0, "before"),
        ("concat", 5, 0, "none"),
        ("wrap", 20, 0, "before"),
        ("wrap", 20, 7, "before"),
        ("wrap", 5, 2, "before"),
    ],
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
    # Few different ids, so that rows of different documents often meet in the same one; many that fill rows.
    sizes = source.choice([0, 1, 5, 12, 13, 14, 19, 20, 21, 40, 41, 60, 90], 60)
    documents = [source.integers(0, 3, size).astype(np.uint16) for size in sizes]
    if separator == "before":
        documents = [np.array([*[END][: len(ids)], *ids], np.uint16) for ids in documents]
    rows, trained = [], set()
    least = length if packing == "concat" else max(1, min_length)
    for ids in [np.concatenate(documents)] if packing == "concat" else documents:
        windows = [ids[start : start + length + 1] for start in range(0, len(ids) - 1, length)]
        kept = [window for window in windows if len(window) > least]
        rows += kept
        trained |= naive_ngrams(ids[: sum(len(window) - 1 for window in kept) + 1])
    cuts = [0, *np.cumsum(source.integers(0, 6, len(rows))).tolist(), len(rows)]  # blocks of 0 to 5 rows
    parts = [rows[first:end] for first, end in itertools.pairwise(cuts) if first < len(rows)]
    blocks = [(np.concatenate([*part, np.empty(0, np.uint16)]), np.array([*map(len, part)], int)) for part in parts]

    # Texts over the borders of documents too, with and without an id that two rows may share.
    texts = [np.concatenate(documents), np.concatenate([row[1:] for row in rows])]
    pieces = [text[place : place + int(source.integers(0, 60))] for text in texts for place in range(0, len(text), 17)]
    items = [[spell(part[part != END]) for part in pieces[n : n + 1 + n % 3]] for n in range(len(pieces))]
    items.append([spell(source.integers(0, 3, 200))])
    path = tmp_path / "items.jsonl"
    path.write_text("".join(json.dumps({"parts": item}) + "\n" for item in items))

    of_items = [set().union(*map(naive_ngrams, to_ids(item))) for item in items]
    overlapping = [number for number, ngrams in enumerate(of_items, 1) if ngrams & trained]
    different = set().union(*of_items)
    (found,) = find_overlap([path], to_ids, blocks, row_length=length + 1)
    assert 0 < len(different & trained) < len(different)
    assert (found.ngrams, found.ngrams_found) == (len(different), len(different & trained))
    assert (found.items, found.items_with_overlap) == (len(items), len(overlapping))
    assert found.items_too_short == sum(not ngrams for ngrams in of_items)
    assert found.first_items_with_overlap == overlapping[:10]


def test_files_are_counted_apart(tmp_path: Path) -> None:
    trained, other = np.arange(30, dtype=np.uint16), np.arange(100, 140, dtype=np.uint16)
    (tmp_path / "a.txt").write_text(spell(trained[:14]))
    lines = [
        {"text": spell(other)},
        {"ctx": spell(trained[:13]), "n": 3, "ends": ["1", {"deep": spell(trained[2:15])}]},
    ]
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as file:
        file.write("\n\n".join(map(json.dumps, [*lines, {"label": 1}])))
    paths = [tmp_path / "a.txt", tmp_path / "b.jsonl.gz"]
    keys = ("file", "items", "items_too_short", "first_items_with_overlap", "ngrams", "ngrams_found")
    found = find_overlap(paths, to_ids, [(trained, np.array([30]))], row_length=30)
    assert [[getattr(of, key) for key in keys] for of in found] == [
        ["a.txt", 1, 0, [1], 2, 2],
        ["b.jsonl.gz", 3, 1, [3], 28 + 2, 2],
    ]
    assert found[0].sha256 != found[1].sha256 and len(found[0].sha256) == 64
    assert [of.ngrams_found for of in find_overlap(paths, to_ids, [], row_length=30)] == [0, 0]


def test_hashes_are_spread() -> None:
    hashes = ngram_hashes(np.random.default_rng(0).integers(0, 2**16, 50_000, dtype=np.uint16))
    # 50,000 of 2**32 values: 0.3 pairs by chance in each half.
    for half in (hashes >> np.uint64(32), hashes & np.uint64(2**32 - 1)):
        assert len(np.unique(half)) > len(half) - 5


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("a.csv", b"a,b", ""),
        ("gone.jsonl", None, ""),
        ("a.jsonl", b'{"text": "1"}\n{"text": "2\n', "line 2"),
        ("a.txt", b"\xff", ""),
        ("a.jsonl.gz", gzip.compress(b'{"text": "1"}\n' * 9, mtime=0)[:-10], "line "),
        ("a.jsonl", b"\n", ""),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, name: str, content: bytes | None, line: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=f"{name}.*{line}"):
        check_files([str(tmp_path / name)])
        find_overlap([tmp_path / name], to_ids, [], row_length=30)

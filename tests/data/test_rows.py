"""Rows equal those that `datasets` reads, for any row length and number of shards."""

import pickle
from pathlib import Path

import numpy as np
import pytest
from datasets import load_from_disk

from gpt2_repro.data.preparation import writing
from gpt2_repro.data.preparation.writing import split_hash, write_rows
from gpt2_repro.data.rows import Rows, open_rows


def written(folder: Path, monkeypatch: pytest.MonkeyPatch, *, fixed: bool) -> list[list[int]]:
    """Write 24 rows in three shards, and return the rows.

    Rows have 5 ids if `fixed`, otherwise 2 to 5.
    """
    monkeypatch.setattr(writing, "SHARD_BLOCKS", 2)
    source = np.random.default_rng(0)
    rows = [source.integers(0, 2**16, 5 if fixed else source.integers(2, 6)).tolist() for _ in range(24)]
    parts = [rows[:4], rows[4:10], rows[10:11], rows[11:17], rows[17:23], rows[23:]]
    blocks = [(np.array(sum(part, []), np.uint16), np.array([len(row) for row in part])) for part in parts]
    done = write_rows(folder, blocks, np.dtype(np.uint16), 5 if fixed else None)
    assert sum(shard.rows for shard in done) == 24 and len(done) == len(list(folder.glob("*.arrow"))) == 3
    assert sum(shard.targets for shard in done) == sum(map(len, rows)) - 24
    assert max(shard.largest_id for shard in done) == max(map(max, rows))
    return rows


def as_lists(rows: Rows, places: range | list[int]) -> list[list[int]]:
    return [row["input_ids"].tolist() for row in rows.__getitems__(places)]


@pytest.mark.parametrize("fixed", [True, False])
def test_rows_are_what_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fixed: bool) -> None:
    wanted = written(tmp_path, monkeypatch, fixed=fixed)
    rows = open_rows(tmp_path)
    assert load_from_disk(str(tmp_path))["input_ids"][:] == wanted
    assert [row.tolist() for row in rows[range(24)]["input_ids"]] == wanted
    assert rows[23]["input_ids"].tolist() == wanted[23] and rows[0]["input_ids"].dtype == np.uint16
    order = [7, 23, 0, 7, 10, 11, 6]
    assert as_lists(rows, order) == [wanted[place] for place in order]
    for place in (24, -1):
        with pytest.raises(IndexError):
            rows[[0, place]]
    targets = np.cumsum([len(row) - 1 for row in wanted])
    for number in (1, 3, 4, 13, 24):
        first = rows.first(int(targets[number - 1]))
        assert len(first) == number and as_lists(first, range(number)) == wanted[:number]
        assert first.lengths().tolist() == [len(row) for row in wanted[:number]]
        assert first.joined()[0].tolist() == sum(wanted[:number], [])
    # Another process opens the files again: the ids are not pickled.
    content = pickle.dumps(rows.first(int(targets[12])))
    assert as_lists(pickle.loads(content), range(13)) == wanted[:13]
    blocks = [(np.arange(500_000, dtype=np.uint16), np.full(100_000, 5))]
    write_rows(tmp_path / "large", blocks, np.dtype(np.uint16), 5 if fixed else None)
    assert len(pickle.dumps(open_rows(tmp_path / "large"))) < len(content) + 10_000


def test_rows_that_differ_in_their_ends_alone_have_another_hash(tmp_path: Path) -> None:
    blocks = [(np.arange(12, dtype=np.uint16), np.array(lengths)) for lengths in ((4, 4, 4), (4, 5, 3))]
    one, other = (write_rows(tmp_path / str(n), [block], np.dtype(np.uint16), None) for n, block in enumerate(blocks))
    assert split_hash(one) != split_hash(other)

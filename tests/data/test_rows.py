"""Rows are read as the library reads them, whatever their form, their shards and the process that reads."""

import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import load_from_disk

from gpt2_repro.data import shards as shards_module
from gpt2_repro.data.collator import collate_rows
from gpt2_repro.data.rows import Rows, open_rows
from gpt2_repro.data.shards import write_rows


Written = Callable[[bool], tuple[Path, list[list[int]]]]


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Written:
    """Writes 24 rows, all of 5 ids or of 2 to 5, as batches of 1 to 6 in three shards."""

    def write(fixed: bool) -> tuple[Path, list[list[int]]]:
        monkeypatch.setattr(shards_module, "SHARD_BLOCKS", 2)
        source = np.random.default_rng(0)
        rows = [source.integers(0, 2**16, 5 if fixed else source.integers(2, 6)).tolist() for _ in range(24)]
        parts = [rows[:4], rows[4:10], rows[10:11], rows[11:17], rows[17:23], rows[23:]]
        blocks = [(np.array(sum(part, []), np.uint16), np.array([len(row) for row in part])) for part in parts]
        done = write_rows(tmp_path, blocks, np.dtype(np.uint16), 5 if fixed else None)
        assert (done.rows, done.targets) == (24, sum(map(len, rows)) - 24)
        assert done.largest_id == max(map(max, rows))
        assert len(list(tmp_path.glob("*.arrow"))) == 3
        return tmp_path, rows

    return write


def as_lists(rows: list[np.ndarray]) -> list[list[int]]:
    return [row.tolist() for row in rows]


@pytest.mark.parametrize("fixed", [True, False])
def test_rows_are_what_was_written(written: Written, fixed: bool) -> None:
    folder, wanted = written(fixed)
    rows = open_rows(folder)
    assert load_from_disk(str(folder))["input_ids"][:] == wanted
    assert len(rows) == 24 and as_lists(rows[range(24)]["input_ids"]) == wanted
    assert rows[23]["input_ids"].tolist() == wanted[23] and rows[0]["input_ids"].dtype == np.uint16
    order = [7, 23, 0, 7, 10, 11, 6]
    assert as_lists([row["input_ids"] for row in rows.__getitems__(order)]) == [wanted[place] for place in order]
    assert rows.lengths().tolist() == [len(row) for row in wanted]
    ids, lengths = rows.joined()
    assert ids.tolist() == sum(wanted, []) and lengths.tolist() == [len(row) for row in wanted]
    for place in (24, -1):
        with pytest.raises(IndexError, match="numbered from 0 to 23"):
            rows[[0, place]]


@pytest.mark.parametrize("fixed", [True, False])
@pytest.mark.parametrize("number", [1, 3, 4, 13, 24])
def test_the_first_rows_are_rows(written: Written, fixed: bool, number: int) -> None:
    folder, wanted = written(fixed)
    rows = open_rows(folder).first(number)
    assert len(rows) == number and as_lists(rows[range(number)]["input_ids"]) == wanted[:number]
    assert rows.lengths().tolist() == [len(row) for row in wanted[:number]]
    assert rows.joined()[0].tolist() == sum(wanted[:number], [])


@pytest.mark.parametrize("fixed", [True, False])
def test_another_process_opens_the_files_itself(written: Written, fixed: bool) -> None:
    folder, wanted = written(fixed)
    rows = open_rows(folder).first(13)
    content = pickle.dumps(rows)
    assert as_lists(pickle.loads(content)[range(13)]["input_ids"]) == wanted[:13]
    content_of_all = len(pickle.dumps(open_rows(folder)))
    blocks = [(np.arange(500_000, dtype=np.uint16), np.full(100_000, 5))]
    write_rows(folder / "large", blocks, np.dtype(np.uint16), 5 if fixed else None)
    assert len(pickle.dumps(open_rows(folder / "large"))) < content_of_all + 1000


@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_loader_gives_the_batches_of_its_sampler(written: Written, workers: int) -> None:
    folder, wanted = written(False)
    rows: Rows = open_rows(folder)
    order = list(range(23, -1, -1))
    loader = torch.utils.data.DataLoader(
        rows,  # type: ignore[arg-type]
        batch_size=5,
        sampler=order,
        collate_fn=collate_rows,
        num_workers=workers,
    )
    seen = [
        [*inputs[:1].tolist(), *labels[labels != -100].tolist()]
        for batch in loader
        for inputs, labels in zip(batch["input_ids"], batch["labels"], strict=True)
    ]
    assert seen == [wanted[place] for place in order]


def test_rows_that_differ_in_their_ends_alone_have_another_hash(tmp_path: Path) -> None:
    ids = np.arange(12, dtype=np.uint16)
    hashes = [
        write_rows(tmp_path / str(n), [(ids, np.array(lengths))], np.dtype(np.uint16), None).sha256
        for n, lengths in enumerate([(4, 4, 4), (4, 5, 3)])
    ]
    assert hashes[0] != hashes[1]

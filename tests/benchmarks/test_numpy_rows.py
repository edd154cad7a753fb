"""Rows that numpy reads from the Arrow files equal those that pyarrow reads."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.numpy_rows import read_ids, read_with_numpy
from gpt2_repro.data import rows
from gpt2_repro.data.arguments import DataArguments
from gpt2_repro.data.preparation import writing
from gpt2_repro.data.preparation.prepare import prepare
from gpt2_repro.data.prepared import PreparedData


ROOT = Path(__file__).parents[2]


def prepared(corpus: list[Path], folder: Path, length: int) -> PreparedData:
    files = [str(path) for path in corpus]
    arguments = {"data_files": files, "tokenizer": "train:300", "dataset_dir": str(folder), "validation_tokens": 500}
    prepare(DataArguments(**arguments, sequence_length=length))
    return PreparedData.read(folder)


@pytest.mark.parametrize("length", [31, 32, 34])  # with and without padding at the end of the file
def test_rows_are_equal(corpus: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    data = prepared(corpus, tmp_path / "data", length)
    wanted = {split: data.rows(split) for split in ("train", "validation")}
    monkeypatch.setattr(rows, "open_rows", rows.open_rows)  # restored after the test
    read_with_numpy()
    for split, expected in wanted.items():
        found = data.rows(split)
        assert type(found) is not type(expected) and len(found) == len(expected) > 2
        for targets in (0, 1, length, length + 1, 10**9):
            for one, other in zip(found.first(targets).joined(), expected.first(targets).joined(), strict=True):
                assert one.tolist() == other.tolist()
        assert found[1]["input_ids"].tolist() == expected[1]["input_ids"].tolist()


def test_several_record_batches_are_refused(
    corpus: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "BLOCK_IDS", 320)
    monkeypatch.setattr(writing, "SHARD_BLOCKS", 10**6)
    data = prepared(corpus, tmp_path / "data", 32)
    assert len(data.manifest.shards["train"]) == 1
    with pytest.raises(SystemExit):
        read_ids(data.path / "train")


@pytest.mark.slow
def test_training_needs_neither_datasets_nor_pyarrow(
    train: Callable[..., Path], events: Callable[[Path], list[dict]], tiny_recipe: Path, tmp_path: Path
) -> None:
    """The losses are those of a normal run."""
    output = tmp_path / "numpy"
    # Python finds neither package, as if they were not installed.
    code = "import runpy, sys; sys.modules.update(dict.fromkeys(('datasets', 'pyarrow'))); del sys.argv[0]; "
    code += "sys.path[0] = 'benchmarks'; runpy.run_path(sys.argv[0], run_name='__main__')"
    words = ["benchmarks/numpy_rows.py", "train.py", tiny_recipe, "--output_dir", output]
    subprocess.run([sys.executable, "-c", code, *words], cwd=ROOT, check=True, timeout=300)
    runs = [output, train(tmp_path / "pyarrow")]
    losses, expected = ([event["loss"] for event in events(run) if "loss" in event] for run in runs)
    assert losses == expected and len(losses) == 8

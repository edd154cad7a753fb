"""Fixtures for tests of the data that prepare_data.py writes."""

from collections.abc import Callable
from pathlib import Path

import pytest

from gpt2_repro.data.arguments import DataArguments


@pytest.fixture
def arguments(corpus: list[Path], tmp_path: Path) -> Callable[..., DataArguments]:
    """Return a function that builds the DataArguments of a small corpus."""

    def build(name: str = "out", **changes: object) -> DataArguments:
        values = {
            "data_files": [str(path) for path in corpus],
            "tokenizer": "train:300",
            "sequence_length": 32,
            "validation_tokens": 500,
            "dataset_dir": str(tmp_path / name),
        }
        return DataArguments(**(values | changes))

    return build


@pytest.fixture
def content() -> Callable[[str | Path], dict[str, bytes]]:
    """Return a function that reads the bytes of all files in a folder."""

    def read(folder: str | Path) -> dict[str, bytes]:
        return {str(p.relative_to(folder)): p.read_bytes() for p in Path(folder).rglob("*") if p.is_file()}

    return read

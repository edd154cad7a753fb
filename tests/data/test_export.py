"""A prepared folder as llm.c's shards: whole, or not there."""

from pathlib import Path

import pytest

from gpt2_repro.data.export import export_llmc
from gpt2_repro.data.preparation.prepare import prepare
from gpt2_repro.data.sources import token_files
from gpt2_repro.errors import UserError


def test_shards_that_do_not_fit_leave_nothing(arguments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = arguments()
    manifest = prepare(args)
    before = sorted(tmp_path.iterdir())
    with monkeypatch.context() as patch:
        # numpy says no more where the disk is full
        patch.setattr(
            token_files.np, "zeros", lambda *words: (_ for _ in ()).throw(OSError("9 requested and 4 written"))
        )
        with pytest.raises(UserError, match="shards .*9 requested and 4 written"):
            export_llmc(args.dataset_dir, manifest, tmp_path / "shards")
    assert sorted(tmp_path.iterdir()) == before
    assert len(export_llmc(args.dataset_dir, manifest, tmp_path / "shards")) == 2

"""Bad input and wrong ids never reach the rows of a prepared folder."""

import json
import os
import shutil
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest

from gpt2_repro.data.arguments import PreparationOptions
from gpt2_repro.data.preparation.prepare import expected_bytes, prepare
from gpt2_repro.data.preparation.staging import Stream
from gpt2_repro.data.prepared import exclusive_lock
from gpt2_repro.data.rows import open_rows
from gpt2_repro.data.sources.local_files import LocalFile
from gpt2_repro.data.tokenizer import Encoder
from gpt2_repro.errors import UserError
from tests.reference import write_llmc_shard


def test_bad_rows_are_refused_or_counted(arguments, corpus: list[Path], tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_bytes(b'{"text": "\xff"}\n{"body": 1}\n')
    args = arguments(data_files=[str(tmp_path / "*.jsonl"), *map(str, corpus)])
    for allowed in (0, 3):
        with pytest.raises(UserError, match=r"a.jsonl, line 1, .*--max_bad_documents"):
            prepare(args, PreparationOptions(num_proc=2, max_bad_documents=allowed))
    # Another limit is the same request: the staged files are resumed.
    manifest = prepare(args, PreparationOptions(max_bad_documents=4)).manifest
    assert manifest.read.bad_documents == 4 and len(manifest.read.bad_examples) == 3
    assert manifest.sha256 == prepare(arguments("plain")).manifest.sha256


def test_a_folder_that_is_read_is_not_replaced(arguments, tmp_path: Path, content) -> None:
    data = prepare(arguments())
    again, folder = PreparationOptions(overwrite=True), Path(arguments().dataset_dir)
    before = content(folder)
    reader = os.dup(0)
    os.close(reader)
    data.lock()  # opens the lowest free descriptor and never closes it
    with pytest.raises(UserError, match="out"):
        prepare(arguments(sequence_length=16), again)
    assert content(folder) == before
    os.close(reader)
    assert prepare(arguments(sequence_length=16), again).manifest.request["sequence_length"] == 16
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    with exclusive_lock(folder, ""), pytest.raises(UserError, match="is being replaced"):
        data.lock()


def test_what_cannot_fit_does_not_start(arguments, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    full = namedtuple("usage", "total used free")(10**9, 10**9, 100)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    with pytest.raises(UserError, match=r"--dataset_dir.*--max_tokens"):
        prepare(arguments())
    assert not list(tmp_path.iterdir())


def test_the_peak_holds_staged_tokens_and_rows_but_no_second_copy_of_own_token_files() -> None:
    text, tokens = LocalFile("a.jsonl", 4_500_000), LocalFile("a.bin", 2_000_000)
    for file, limit, wanted in ((text, 0, 2e6 + 2e6), (text, 500_000, 1e6 + 1e6), (tokens, 0, 2e6)):
        assert expected_bytes([Stream("train-0", [file], limit)], 2, characters=False) == pytest.approx(wanted)


@pytest.mark.parametrize("number", [0, 1000])
def test_an_encoder_that_differs_is_found_in_the_first_document_and_the_thousandth(
    arguments, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: int
) -> None:
    many = tmp_path / "many.jsonl"
    many.write_text("".join(json.dumps({"text": f"document {n}"}) + "\n" for n in range(1100)), encoding="utf-8")
    manifest = prepare(arguments(data_files=[str(many)])).manifest
    assert manifest.versions["fastokens"]
    plain = Encoder._plain

    def wrong(self: Encoder, documents: list[str]):
        ids, lengths = plain(self, documents)
        return (ids[::-1] if documents == [f"document {number}"] else ids), lengths

    monkeypatch.setattr(Encoder, "_plain", wrong)
    with pytest.raises(UserError, match=f"'document {number}' of .*many.jsonl .*--encoder tokenizers"):
        prepare(arguments("other", data_files=[str(many)]))
    slow = prepare(arguments("slow", data_files=[str(many)]), PreparationOptions(encoder="tokenizers"))
    assert slow.manifest.sha256 == manifest.sha256


def test_shards_of_tokens_give_the_rows_that_they_were_made_from(arguments, tmp_path: Path) -> None:
    args, shards = arguments(), tmp_path / "shards"
    manifest = prepare(args).manifest
    shards.mkdir()
    for split, name in (("train", "out_train_000001"), ("validation", "out_val_000000")):
        rows = open_rows(Path(args.dataset_dir, split)).joined()[0].reshape(-1, 33)
        write_llmc_shard(shards / f"{name}.bin", np.append(rows[:, :-1], rows[-1, -1]))
    tokenizer = f"{args.dataset_dir}/tokenizer"
    form = {"data_files": [str(shards / "*.bin")], "tokenizer": tokenizer, "split": "source"}
    back = prepare(arguments("back", **form)).manifest
    assert back.sha256 == manifest.sha256
    for split in ("train", "validation"):
        counts = back.counts[split]
        assert counts.documents == manifest.counts[split].documents and counts.dropped_tokens == 0
    for changes, named in [
        ({"split": "head"}, "--split source"),
        ({"split": "hash"}, "--split source"),
        ({"separator": "after"}, "--separator before"),
        ({"tokenizer": "train:300"}, "--tokenizer"),
        ({"validation_text": True}, "--validation_text"),
    ]:
        with pytest.raises(UserError, match=named):
            prepare(arguments("wrong", **form | changes))
    beyond = np.fromfile(shards / "out_train_000001.bin", np.uint16)
    beyond[-3] = 300
    beyond.tofile(shards / "out_train_000001.bin")
    with pytest.raises(UserError, match="the id 300, .*--tokenizer"):
        prepare(arguments("wrong", **form))
    for path in shards.iterdir():
        np.fromfile(path, "<u2", offset=1024).astype(np.int64).tofile(path)
    with pytest.raises(UserError, match="more than 16 bits"):
        prepare(arguments("wrong", **form | {"separator": "none"}))
    assert len(list((tmp_path).iterdir())) == 3  # only out, shards and back: no incomplete folder is left

"""What goes wrong on the way is counted, refused or taken up, and never changes the folder."""

import json
import os
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest

import prepare_data
from gpt2_repro.data import locks
from gpt2_repro.data.arguments import PreparationOptions
from gpt2_repro.data.encoder import Encoder
from gpt2_repro.data.locks import hold_for_reading
from gpt2_repro.data.preparation import disk
from gpt2_repro.data.preparation import prepare as prepare_module
from gpt2_repro.data.preparation.prepare import prepare
from gpt2_repro.data.sources.files import SourceFile
from gpt2_repro.data.sources.text_files import TextFile
from gpt2_repro.data.sources.token_files import TokenFile
from gpt2_repro.errors import UserError


def test_bad_rows_are_refused_or_counted(arguments, corpus: list[Path], tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_bytes(b'{"text": "\xff"}\n{"body": 1}\n')
    args = arguments(data_files=[str(tmp_path / "*.jsonl"), *map(str, corpus)])
    for allowed in (0, 3):
        with pytest.raises(UserError, match=r"a.jsonl, line 1, .*--max_bad_documents"):
            prepare(args, PreparationOptions(num_proc=2, max_bad_documents=allowed))
    # Another limit is no other request: what was staged is taken up.
    manifest = prepare(args, PreparationOptions(max_bad_documents=4))
    assert manifest["read"]["bad_documents"] == 4 and len(manifest["read"]["bad_examples"]) == 3
    assert manifest["sha256"] == prepare(arguments("plain"))["sha256"]


def test_a_folder_that_is_read_is_not_replaced(
    arguments, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content
) -> None:
    opened: list[int] = []
    monkeypatch.setattr(locks.os, "open", lambda *w, **named: opened.append(os_open(*w, **named)) or opened[-1])
    prepare(arguments())
    again, folder = PreparationOptions(overwrite=True), Path(arguments().dataset_dir)
    hold_for_reading(folder)
    reader = opened[-1]
    before = content(folder)
    with pytest.raises(UserError, match="out"):
        prepare(arguments(sequence_length=16), again)
    assert content(folder) == before
    os.close(reader)
    replaced = prepare(arguments(sequence_length=16), again)
    assert replaced["request"]["sequence_length"] == 16
    assert json.loads((folder / "manifest.json").read_text()) == replaced
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    with locks.hold_alone(folder), pytest.raises(UserError, match="is being replaced"):
        hold_for_reading(folder)


os_open = os.open


def test_a_kill_between_the_two_renames_is_finished(
    arguments, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    prepare(arguments())
    rename = Path.rename
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", lambda a, b: rename(a, b) if b.name != "out" else (_ for _ in ()).throw(OSError))
        with pytest.raises(OSError):
            prepare(arguments(sequence_length=16), PreparationOptions(overwrite=True))
    assert not (tmp_path / "out").exists()
    assert prepare(arguments(sequence_length=16))["request"]["sequence_length"] == 16
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_cannot_fit_does_not_start(arguments, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda path: usage(10**9, 0, 10**8))
    with monkeypatch.context() as patch:
        patch.setattr(disk, "peak_bytes", lambda **sizes: 10**9)
        with pytest.raises(UserError, match=r"--dataset_dir.*--max_tokens"):
            prepare(arguments())
    assert not list(tmp_path.iterdir())
    prepare(arguments())


def test_the_peak_holds_staged_tokens_and_rows_but_no_second_copy_of_own_token_files() -> None:
    def peak(file: SourceFile, limit: int = 0) -> float:
        return disk.expected_peak([([file], limit)], itemsize=2, characters=False)

    assert peak(TextFile("a.jsonl", 4_500_000)) == pytest.approx(1.02 * (2e6 + 2e6))
    assert peak(TextFile("a.jsonl", 4_500_000), 500_000) == pytest.approx(1.02 * (1e6 + 1e6))
    assert peak(TokenFile("a.bin", 2_000_000)) == pytest.approx(1.02 * 2e6)


def test_an_encoder_that_differs_is_found_in_the_first_document_and_every_thousandth(
    arguments, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    many = tmp_path / "many.jsonl"
    many.write_text("".join(json.dumps({"text": f"document {n}"}) + "\n" for n in range(2100)))
    looked_at: list[str] = []
    agrees, plain = Encoder.agrees, Encoder._plain
    monkeypatch.setattr(Encoder, "agrees", lambda self, text: looked_at.append(text) or agrees(self, text))
    manifest = prepare(arguments(data_files=[str(many)]))
    assert manifest["versions"]["fastokens"]
    assert looked_at == ["document 0", "document 1000", "document 2000"]

    def wrong(self: Encoder, documents: list[str]):
        ids, lengths = plain(self, documents)
        return (ids[::-1] if documents == ["document 1000"] else ids), lengths

    monkeypatch.setattr(Encoder, "_plain", wrong)
    with pytest.raises(UserError, match="'document 1000' of .*many.jsonl .*--encoder tokenizers"):
        prepare(arguments("other", data_files=[str(many)]))
    slow = prepare(arguments("slow", data_files=[str(many)]), PreparationOptions(encoder="tokenizers"))
    assert slow["sha256"] == manifest["sha256"]


def test_staged_tokens_that_rot_are_made_anew(arguments, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    whole = prepare(arguments("whole"))
    with monkeypatch.context() as patch:
        patch.setattr(prepare_module, "_write_folder", lambda *words: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            prepare(arguments())
    path = tmp_path / "out.staging" / "streams" / "train-0" / "00001-00000.ids"
    ids = bytearray(path.read_bytes())
    ids[100] ^= 1
    path.write_bytes(ids)
    with pytest.raises(UserError, match=r"staged tokens of .*b.jsonl are damaged: start the same command again"):
        prepare(arguments())
    assert prepare(arguments())["sha256"] == whole["sha256"]


def test_a_mixture_has_its_weights_and_its_counts(arguments, tmp_path: Path, content) -> None:
    for name, words in (("one", "alpha beta "), ("two", "gamma "), ("three", "delta epsilon zeta ")):
        lines = (json.dumps({"text": words * (5 + n % 7)}) + "\n" for n in range(300))
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    source = ",".join(f"{tmp_path / name}.jsonl={weight}" for name, weight in (("one", 2), ("two", 1), ("three", 5)))
    form = {"data_files": [], "source": source, "packing": "wrap", "validation_tokens": 800}
    mixed = prepare(arguments(**form))
    assert [round(described["weight"], 3) for described in mixed["source"]["sources"]] == [0.25, 0.125, 0.625]
    for split in ("validation", "train"):
        counts = mixed["counts"][split]
        assert sum(of["tokens"] for of in counts["sources"].values()) == counts["tokens"]
        shares = [of["tokens"] / counts["tokens"] for of in counts["sources"].values()]
        assert np.allclose(shares, [0.25, 0.125, 0.625], atol=0.02 if split == "train" else 0.1)
    small = prepare(arguments("small", **form, max_tokens=3000), PreparationOptions(num_proc=2))
    assert 3000 <= sum(counts["tokens"] for counts in small["counts"].values()) < 3200


def test_tokens_come_back_as_they_were_exported(arguments, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    args, shards = arguments(), tmp_path / "shards"
    manifest = prepare(args)
    words = ["--data_files", *args.data_files, "--dataset_dir", args.dataset_dir, "--tokenizer", "train:300"]
    words += ["--sequence_length", "32", "--validation_tokens", "500", "--export_llmc", str(shards)]
    prepare_data.main(words)
    assert sorted(path.name for path in shards.iterdir()) == ["out_train_000001.bin", "out_val_000000.bin"]
    assert f"{shards / 'out_val_000000.bin'}\n" in capsys.readouterr().out
    with pytest.raises(UserError, match="--export_llmc"):
        prepare_data.main(words)
    tokenizer = f"{args.dataset_dir}/tokenizer"
    form = {"data_files": [str(shards / "*.bin")], "tokenizer": tokenizer, "split": "source"}
    back = prepare(arguments("back", **form))
    assert back["sha256"] == manifest["sha256"]
    for split in ("train", "validation"):
        counts = back["counts"][split]
        assert counts["documents"] == manifest["counts"][split]["documents"] and counts["dropped_tokens"] == 0
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
    with pytest.raises(UserError, match="the id 300 .*--tokenizer"):
        prepare(arguments("wrong", **form))
    assert len(list((tmp_path).iterdir())) == 3  # out, shards, back: nothing half-made


def test_your_own_validation_files_and_sets(arguments, documents: list[str], tmp_path: Path) -> None:
    for name, part in (("train_a", documents[:60]), ("train_b", documents[60:110]), ("my-val", documents[110:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"body": text}) + "\n" for text in part))
    (tmp_path / "plain.txt").write_text(" ".join(documents[:3]))
    files = {"data_files": [str(tmp_path / "*.jsonl")], "text_column": "body", "split": "source"}
    args = arguments(**files, validation_text=True, validation_sets=[f"plain={tmp_path / 'plain.txt'}"])
    manifest = prepare(args)
    counts = {split: of["documents"] + of["empty_documents"] for split, of in manifest["counts"].items()}
    assert counts == {"train": 110, "validation": 13, "validation_plain": 1}
    text = Path(args.dataset_dir, "text", "validation.jsonl").read_text().splitlines()
    assert [json.loads(line)["text"] for line in text] == documents[110:]

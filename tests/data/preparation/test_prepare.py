"""A prepared folder is absent or complete, and the same for any number of workers."""

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from collections import namedtuple
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import load_dataset

from gpt2_repro import cli
from gpt2_repro.data.arguments import PreparationOptions
from gpt2_repro.data.preparation.prepare import prepare
from gpt2_repro.data.prepared import exclusive_lock
from gpt2_repro.data.rows import open_rows
from gpt2_repro.data.tokenizer import Encoder
from gpt2_repro.errors import UserError
from gpt2_repro.evaluation.model_card import _public_source
from gpt2_repro.prepare import describe
from tests.commands import ROOT
from tests.reference import write_jsonl, write_llmc_shard


def test_the_progress_of_one_large_file_is_shown(arguments, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(cli, "LINE_SECONDS", 0)
    for tokenizer, separator in (("train:300", "before"), ("char", "none")):
        path = write_jsonl(tmp_path / f"{tokenizer[:4]}.jsonl", ["one two three " * 100] * 50)
        prepare(arguments(tokenizer[:4], data_files=[path], tokenizer=tokenizer, separator=separator))
        lines = re.findall(r"read for the tokenizer: (\d+)%", capsys.readouterr().err)
        percent = [int(line) for line in lines]
        assert percent == sorted(percent) and percent[0] < 10 and 80 < percent[-1] <= 100


@pytest.mark.parametrize("form", [{}, {"packing": "wrap", "min_length": 12, "max_tokens": 3000}])
def test_any_number_of_workers_gives_the_same_bytes(arguments, form: dict, content) -> None:
    one, two = arguments("one", **form), arguments("two", **form)
    counts = prepare(one).manifest.counts.values()
    prepare(two, PreparationOptions(num_proc=2))
    assert content(one.dataset_dir) == content(two.dataset_dir)
    if one.max_tokens:
        assert 3000 <= sum(of.tokens for of in counts) < 3000 + 2000


def test_a_finished_folder_is_returned_and_changed_files_are_named(arguments, tmp_path: Path, caplog, content) -> None:
    path = tmp_path / "grows.jsonl"
    write_jsonl(path, ["one two three " * 300])
    files = {"data_files": [str(tmp_path / "*.jsonl")]}
    data, before = prepare(arguments(**files)), content(tmp_path / "out")
    for changed in (False, True):
        if changed:
            write_jsonl(path, ["other"])
        assert prepare(arguments(**files)) == data
        assert (str(path) in caplog.text) == changed
    with pytest.raises(UserError, match="--sequence_length 32.*--sequence_length 16"):
        prepare(arguments(**files, sequence_length=16))
    assert content(tmp_path / "out") == before
    (tmp_path / "out" / "manifest.json").write_text("{", encoding="utf-8")
    for overwrite in (False, True):
        with pytest.raises(UserError, match="--dataset_dir"):
            prepare(arguments(), PreparationOptions(overwrite=overwrite))


def test_too_little_text_is_refused_and_a_single_document_is_cut(arguments, tmp_path: Path) -> None:
    path = tmp_path / "one.txt"
    one = {"data_files": [str(path)]}
    for repeats, changes in ((1, {}), (12, {}), (12, {"split": "hash"}), (400, {"validation_tokens": 9})):
        path.write_text("one two " * repeats, encoding="utf-8")
        with pytest.raises(UserError, match="validation split .* a row needs 33"):
            prepare(arguments(**one, **changes))
        assert [path.name for path in tmp_path.iterdir()] == ["one.txt"]
    for name in ("head", "hash"):
        counts = prepare(arguments(name, **one, split=name, validation_fraction=0.1)).manifest.counts
        assert counts["validation"].documents == counts["train"].documents == 1
        held_out, rest = counts["validation"].tokens, counts["train"].tokens
        assert held_out == round(0.1 * (held_out + rest))


def test_a_part_without_text_before_the_cut_document(arguments, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n", encoding="utf-8")
    write_jsonl(tmp_path / "b.jsonl", ["one two " * 400])
    write_jsonl(tmp_path / "alone.jsonl", ["one two " * 400])
    form = {"split": "head", "validation_fraction": 0.1}
    files = [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]
    with_blank = prepare(arguments("blank", **form, data_files=files))
    alone = prepare(arguments("one", **form, data_files=[str(tmp_path / "alone.jsonl")]))
    assert with_blank.manifest.sha256 == alone.manifest.sha256


def test_a_file_that_is_passed_twice_is_refused(
    arguments, corpus: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = corpus[0]
    monkeypatch.chdir(first.parent)
    links = tmp_path / "links"
    links.mkdir()
    (links / "soft [1].jsonl").symlink_to(first)
    (links / "hard.jsonl").hardlink_to(corpus[1])
    (links / "folder").symlink_to(first.parent)
    for names in (
        ["a.jsonl", "a.jsonl"],
        ["a.jsonl", "./a.jsonl"],
        ["a.jsonl", str(first)],
        ["*.jsonl", "[a].jsonl"],
        [".", f"../{first.parent.name}/*.jsonl"],
        ["a.jsonl", str(links / "soft [1].jsonl")],
        ["b.jsonl", str(links / "hard.jsonl")],
        [str(links)],
    ):
        with pytest.raises(UserError, match=r"\.jsonl.*\.jsonl.* once"):
            prepare(arguments("twice", data_files=names))
        assert not any(path.name.startswith("twice") for path in tmp_path.iterdir())


def test_tokens_of_each_source_are_counted(arguments, documents, tmp_path: Path, capsys) -> None:
    """The counts are those of each source alone, whether files are passed as globs, folders or by name."""
    tokenizer = f"{prepare(arguments('tokenizer')).path}/tokenizer"
    for name, texts in (("web", documents[:80]), ("books", documents[80:])):
        (tmp_path / name).mkdir()
        for number, text in enumerate(texts):
            write_jsonl(tmp_path / name / f"{number:03}.jsonl", [text])
    form = {"tokenizer": tokenizer, "split": "hash", "validation_fraction": 0.1}
    globs = [f"{tmp_path}/web/*.jsonl", f"{tmp_path}/books"]
    alone = {}
    for number, pattern in enumerate(globs):
        counts = prepare(arguments(f"alone{number}", **form, data_files=[pattern])).manifest.counts
        alone[pattern] = {split: of_split.tokens for split, of_split in counts.items()}
    together = prepare(arguments("together", **form, data_files=globs), PreparationOptions(num_proc=2))
    describe(together, max_tokens=0)
    printed = capsys.readouterr().out
    named = [str(path) for folder in ("web", "books") for path in (tmp_path / folder).glob("*.jsonl")]
    by_name = prepare(arguments("by_name", **form, data_files=named))
    assert by_name.manifest.sha256 == together.manifest.sha256
    for split, counted in together.manifest.tokens_by_source.items():
        assert counted == {pattern: of_split[split] for pattern, of_split in alone.items()}
        assert sum(counted.values()) == together.manifest.counts[split].tokens
        for source, tokens in counted.items():
            assert f"{source}: {tokens:,} tokens ({tokens / sum(counted.values()):.1%})" in printed
        folders = {str(tmp_path / "web"): counted[globs[0]], str(tmp_path / "books"): counted[globs[1]]}
        assert by_name.manifest.tokens_by_source[split] == folders


def parquet_file(path: Path, texts: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"text": texts}), path)


# Files of data sets of the Hub after `git clone`: in data/, in a folder per split, and of other formats.
CLONES = [
    ["data/{}-00000-of-00001.parquet", "data/unsupervised-00000-of-00001.parquet"],
    ["en/{}/part.0.parquet"],
    ["{}.parquet"],
    ["corpus_{}_v2.parquet"],
]


@pytest.mark.parametrize("names", CLONES, ids=[names[0] for names in CLONES])
def test_the_splits_of_a_cloned_dataset_are_not_mixed(arguments, documents, tmp_path: Path, names, caplog) -> None:
    """The rows are those of the files that `datasets` puts into the split train, for each --split."""
    caplog.set_level("INFO")
    clone = tmp_path / "test" / "clone"  # the names of folders above the clone mean nothing
    parts = {"test": documents[:30], "train": documents[30:90], "validation": documents[90:]}
    for split, texts in parts.items():
        parquet_file(clone / names[0].format(split), texts)
    for name in names[1:]:
        parquet_file(clone / name, ["not used"])
    (clone / "dataset_infos.json").write_text("{}", encoding="utf-8")
    (clone / "README.md").write_text("# A card", encoding="utf-8")
    loaded = load_dataset(str(clone), cache_dir=str(tmp_path / "cache"))
    assert {split: loaded[split]["text"][:] for split in parts} == parts
    alone = tmp_path / "alone"
    alone.mkdir()
    plain = {split: write_jsonl(alone / f"{split}.jsonl", texts) for split, texts in parts.items()}
    tokenizer = f"{prepare(arguments('tokenizer')).path}/tokenizer"
    for split in ("head", "hash", "source"):
        form = {"tokenizer": tokenizer, "split": split, "validation_fraction": 0.1}
        used = ["train", "validation"] if split == "source" else ["train"]
        wanted = prepare(arguments(f"wanted_{split}", **form, data_files=[plain[name] for name in used]))
        for kind, pattern in (("folder", str(clone)), ("glob", f"{clone}/**/*.parquet")):
            caplog.clear()
            data = prepare(arguments(f"{kind}_{split}", **form, data_files=[pattern]))
            assert data.manifest.sha256 == wanted.manifest.sha256
            assert str(clone / names[0].format("test")) in caplog.text
            assert ("--split source." in caplog.text) == (split != "source")
            caplog.clear()
            prepare(arguments(f"{kind}_{split}", **form, data_files=[pattern]))
            assert "changed" not in caplog.text
    # A validation set has all files that were passed, and a model card no paths of this machine.
    alone_again = {"data_files": [plain["train"]], "validation_sets": [f"clone={clone}"], "tokenizer": tokenizer}
    described = prepare(arguments("set", **alone_again)).manifest.validation_sets["clone"]
    assert {file["path"] for file in described["files"]} == set(map(str, clone.rglob("*.parquet")))
    described = json.loads(json.dumps(_public_source(data.manifest.source)))
    assert described["local files"] == 2
    assert str(tmp_path) not in str(described)


def test_links_are_followed_and_damaged_folders_refused(
    arguments, corpus: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = prepare(arguments("wanted")).manifest.sha256
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "more").symlink_to(corpus[0].parent)
    (folder / "loop").symlink_to(folder)
    assert prepare(arguments("folder", data_files=[str(folder)])).manifest.sha256 == wanted
    (folder / "gone").symlink_to(tmp_path / "missing")
    with pytest.raises(UserError, match="text/gone"):
        prepare(arguments("gone", data_files=[str(folder)]))
    (folder / "gone").unlink()
    (folder / "locked").mkdir()
    scandir = os.scandir

    def refuse(path: str) -> object:  # the tests may run as root, who can read everything
        if Path(path) == folder / "locked":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    for pattern in (folder, f"{folder}/**/*.jsonl"):
        with pytest.raises(UserError, match="text/locked"):
            prepare(arguments("locked", data_files=[str(pattern)]))


def test_documents_that_would_be_read_twice_are_refused(arguments, corpus: list[Path]) -> None:
    first, second = corpus
    with pytest.raises(UserError, match="'mine'"):
        prepare(arguments(validation_sets=[f"mine={second}"]))
    prepare(arguments("set", data_files=[str(first)], validation_sets=[f"mine={second}"]))


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


def test_a_folder_that_is_read_is_not_replaced(arguments, content) -> None:
    data = prepare(arguments())
    again, before = PreparationOptions(overwrite=True), content(data.path)
    reader = os.dup(0)
    os.close(reader)
    data.lock()  # opens the lowest free descriptor and never closes it
    with pytest.raises(UserError, match="out"):
        prepare(arguments(sequence_length=16), again)
    assert content(data.path) == before
    os.close(reader)
    assert prepare(arguments(sequence_length=16), again).manifest.request["sequence_length"] == 16
    with exclusive_lock(data.path, ""), pytest.raises(UserError, match="is being replaced"):
        data.lock()


def test_a_source_with_less_than_max_tokens_is_announced(arguments, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    prepare(arguments("all", max_tokens=10**6))
    assert "of the 1,000,000 tokens of --max_tokens" in caplog.text
    caplog.clear()
    prepare(arguments("some", max_tokens=3000))
    assert "--max_tokens" not in caplog.text


def test_the_disk_is_checked_before_the_start(arguments, real_data, monkeypatch, tmp_path: Path) -> None:
    text, tokens = write_jsonl(tmp_path / "a.jsonl", ["one two three " * 50_000]), tmp_path / "a.bin"
    np.resize([50_256, *range(1000, 3000)], 5_000_000).astype(np.uint16).tofile(tokens)
    gpt2 = {"tokenizer": str(real_data / "gpt2"), "data_files": [str(tokens)]}
    # Two bytes per token: tokens and rows of a text, only the rows of a token file.
    for files, needed in (({"data_files": [text]}, 4 * Path(text).stat().st_size / 4.5), (gpt2, 1e7)):
        for share, is_enough in ((0.35, False), (0.9, True)):
            usage = namedtuple("usage", "free")(round(share * needed))
            with monkeypatch.context() as patch:
                patch.setattr(shutil, "disk_usage", lambda path, usage=usage: usage)
                with nullcontext() if is_enough else pytest.raises(UserError, match=r"--dataset_dir.*--max_tokens"):
                    prepare(arguments("out", **files), PreparationOptions(overwrite=True))
            assert {path.name for path in tmp_path.iterdir()} - {"out"} == {"a.jsonl", "a.bin"}


def test_an_encoder_that_differs_is_noticed(arguments, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    files = {"data_files": [write_jsonl(tmp_path / "many.jsonl", [f"document {number}" for number in range(1100)])]}
    manifest = prepare(arguments(**files)).manifest
    assert manifest.versions["fastokens"]
    plain = Encoder._plain

    def wrong(self: Encoder, documents: list[str]):
        ids, lengths = plain(self, documents)
        return (ids[::-1] if documents == ["document 1000"] else ids), lengths

    monkeypatch.setattr(Encoder, "_plain", wrong)
    with pytest.raises(UserError, match="'document 1000' of .*many.jsonl .*--encoder tokenizers"):
        prepare(arguments("other", **files))
    slow = prepare(arguments("slow", **files), PreparationOptions(encoder="tokenizers"))
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
        assert back.counts[split].documents == manifest.counts[split].documents
    for changes, named in [({"split": "head"}, "--split source"), ({"separator": "after"}, "--separator before")]:
        with pytest.raises(UserError, match=named):
            prepare(arguments("wrong", **form | changes))
    beyond = np.fromfile(shards / "out_train_000001.bin", np.uint16)
    beyond[-3] = 300
    beyond.tofile(shards / "out_train_000001.bin")
    with pytest.raises(UserError, match="the id 300, .*--tokenizer"):
        prepare(arguments("wrong", **form))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "out", "shards"]  # no incomplete folder


def test_a_preparation_imports_no_torch_and_no_files_of_users(corpus, tiny_recipe: Path, tmp_path: Path) -> None:
    """Neither next to the scripts, nor in the folder in which workers and the process that saves start."""
    for name in ("prepare_data.py", "train.py"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("gpt2_repro", "recipes", "accelerate_configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    for name in ("types", "random", "json", "numpy"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the file of a user')", encoding="utf-8")
    words = ["--data_files", *map(str, corpus), "--dataset_dir", "out", "--tokenizer", "train:300"]
    form = ["--num_proc", "2", "--sequence_length", "32", "--validation_tokens", "500"]
    training = ["train.py", str(tiny_recipe), "--output_dir", "run", "--max_steps", "1", "--warmup_steps", "0"]
    for script, folder in ((["prepare_data.py", *words, *form], "out"), (training, "run/checkpoint-1")):
        command = [sys.executable, "-X", "importtime", *script]
        done = subprocess.run(command, cwd=tmp_path, check=False, capture_output=True, text=True)
        assert done.returncode == 0 and "the file of a user" not in done.stderr, done.stderr
        assert (tmp_path / folder / "manifest.json").is_file()
        assert bool(re.search(r"\| +torch$", done.stderr, re.MULTILINE)) == (script == training)

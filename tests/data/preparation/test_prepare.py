"""A prepared folder is finished and verified, or absent; the same for any number of workers and any interruption."""

import gzip
import json
import subprocess
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from datasets import load_from_disk
from transformers import AutoTokenizer

from gpt2_repro.data.arguments import PreparationOptions
from gpt2_repro.data.encoder import Encoder
from gpt2_repro.data.preparation import cutting
from gpt2_repro.data.preparation import prepare as prepare_module
from gpt2_repro.data.preparation.prepare import prepare
from gpt2_repro.data.preparation.staged import StagedPart
from gpt2_repro.data.shards import verify
from gpt2_repro.data.sources import text_files
from gpt2_repro.data.sources.embedded import Docstrings, Topics
from gpt2_repro.data.tokenizer import train_tokenizer
from gpt2_repro.errors import UserError


def rows(folder: str | Path, split: str) -> np.ndarray:
    return load_from_disk(str(Path(folder, split))).with_format("numpy")["input_ids"][:]


def test_the_folder_is_what_its_manifest_says(arguments, documents: list[str]) -> None:
    args = arguments()
    manifest = prepare(args)
    assert json.loads(Path(args.dataset_dir, "manifest.json").read_text()) == json.loads(json.dumps(manifest))
    tokenizer = AutoTokenizer.from_pretrained(f"{args.dataset_dir}/tokenizer")
    streams = {}
    for split in ("train", "validation"):
        table, counts = rows(args.dataset_dir, split), manifest["counts"][split]
        assert table.shape == (counts["rows"], 33)
        assert (table[1:, 0] == table[:-1, -1]).all()  # stride of one row
        streams[split] = [*table[:, :-1].ravel(), table[-1, -1]]
        assert len(streams[split]) + counts["dropped_tokens"] == counts["tokens"]
        assert counts["row_tokens"] == counts["rows"] * 32
        features = load_from_disk(f"{args.dataset_dir}/{split}").features["input_ids"]
        assert (features.feature.dtype, features.length) == ("uint16", 33)
    texts = [tokenizer.decode(stream).split("<|endoftext|>") for stream in streams.values()]
    held_out = [text for text in texts[1] if text]
    # llm.c's way: the first documents make the validation set, in order, each behind a separator.
    assert held_out == documents[: len(held_out) - 1] + [held_out[-1]]
    assert documents[len(held_out) - 1].startswith(held_out[-1])
    counts = manifest["counts"]
    assert sum(counts[split]["documents"] + counts[split]["empty_documents"] for split in counts) == len(documents)
    assert sum(counts[split]["empty_documents"] for split in counts) == 1
    assert max(max(stream) for stream in streams.values()) <= manifest["largest_id"] < manifest["vocab_size"] == 300
    assert not Path(args.dataset_dir + ".staging").exists()


@pytest.mark.parametrize("separator", ["before", "after", "none"])
def test_wrap_cuts_each_document_alone(arguments, documents: list[str], separator: str) -> None:
    args = arguments(packing="wrap", min_length=12, separator=separator)
    manifest = prepare(args)
    encoder = Encoder(Path(args.dataset_dir, "tokenizer"), separator=separator)
    encoded = [ids.tolist() for ids in encoder.encode_each(documents)]
    held_out = next(n for n in range(len(encoded)) if sum(map(len, encoded[:n])) >= 500)
    for split, part in (("validation", encoded[:held_out]), ("train", encoded[held_out:])):
        windows = [ids[start : start + 33] for ids in part for start in range(0, max(0, len(ids) - 1), 32)]
        wanted = [window for window in windows if len(window) > 12]
        table = load_from_disk(f"{args.dataset_dir}/{split}")
        assert table.features["input_ids"].feature.dtype == "uint16" and table.features["input_ids"].length == -1
        assert table["input_ids"][:] == wanted
        targets = sum(len(row) - 1 for row in wanted)
        dropped = sum(len(window) - 1 for window in windows if len(window) <= 12)
        assert dropped and len(wanted) < len(windows)
        assert manifest["counts"][split] == {
            "documents": sum(1 for ids in part if ids),
            "empty_documents": sum(1 for ids in part if not ids),
            "tokens": sum(map(len, part)),
            "rows": len(wanted),
            "row_tokens": targets,
            "dropped_tokens": dropped,
        }
    assert (manifest["request"]["packing"], manifest["request"]["min_length"]) == ("wrap", 12)
    assert manifest["reference_losses"]["bigram"] < manifest["reference_losses"]["unigram"]
    verify(args.dataset_dir, manifest)


@pytest.mark.parametrize("form", [{}, {"packing": "wrap", "min_length": 12}], ids=["concat", "wrap"])
def test_any_number_of_workers_gives_the_same_bytes(arguments, form: dict) -> None:
    one = prepare(arguments("one", **form))
    two = prepare(arguments("two", **form), PreparationOptions(num_proc=2))
    assert one["sha256"] == two["sha256"] and one["counts"] == two["counts"]
    shards = [sorted(Path(arguments(name).dataset_dir, "train").glob("*.arrow")) for name in ("one", "two")]
    assert [path.read_bytes() for path in shards[0]] == [path.read_bytes() for path in shards[1]]


def test_a_finished_folder_is_found_again_and_another_request_refused(arguments) -> None:
    args = arguments()
    first = prepare(args)
    stamp = Path(args.dataset_dir, "manifest.json").stat().st_mtime_ns
    assert prepare(args) == json.loads(json.dumps(first))
    assert Path(args.dataset_dir, "manifest.json").stat().st_mtime_ns == stamp
    with pytest.raises(UserError, match="sequence_length 32, not 16"):
        prepare(arguments(sequence_length=16))


def test_files_that_came_or_changed_later_are_named(arguments, corpus, tmp_path: Path, caplog) -> None:
    path = tmp_path / "grows.jsonl"
    path.write_text('{"text": "one"}\n')
    args = arguments(data_files=[*map(str, corpus), str(tmp_path / "*.jsonl")])
    prepare(args)
    prepare(args)
    assert "does not hold" not in caplog.text
    path.write_text('{"text": "one more"}\n')
    prepare(args)
    assert f"out does not hold {path} as it is now: --overwrite prepares it anew" in caplog.text
    caplog.clear()
    path.unlink()
    prepare(args)
    assert "does not hold" not in caplog.text


def test_hash_split_is_by_document_and_disjoint(arguments, documents: list[str]) -> None:
    args = arguments(split="hash", validation_fraction=0.2, validation_text=True)
    manifest = prepare(args)
    lines = Path(args.dataset_dir, "text", "validation.jsonl").read_text().splitlines()
    held_out = [json.loads(line)["text"] for line in lines]
    assert len(held_out) == manifest["counts"]["validation"]["documents"] and set(held_out) < set(documents)
    assert 0.08 < len(held_out) / len(documents) < 0.35
    reversed_files = arguments("other", split="hash", validation_fraction=0.2, validation_text=True)
    reversed_files.data_files = reversed_files.data_files[1:]
    prepare(reversed_files)
    again = Path(reversed_files.dataset_dir, "text", "validation.jsonl").read_text().splitlines()
    assert set(again) < set(lines)  # a document's place is its own, whatever else there is


@pytest.mark.parametrize("packing", ["concat", "wrap"])
def test_a_file_of_one_document_is_never_in_memory_whole(
    arguments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packing: str
) -> None:
    ids = np.random.default_rng(0).integers(0, 257, 10_007).astype(np.uint16)
    ids.tofile(tmp_path / "train.bin")
    ids[:500].tofile(tmp_path / "val.bin")
    sizes = []
    monkeypatch.setattr(cutting, "PIECE_TOKENS", 100)
    for name in ("pack_rows", "pack_windows"):
        function = getattr(cutting, name)

        def noted(pieces, *words, function=function, **named):
            noting = (sizes.append(np.size(piece[0] if packing == "wrap" else piece)) or piece for piece in pieces)
            yield from function(noting, *words, **named)

        monkeypatch.setattr(cutting, name, noted)
    train_tokenizer(["abc"], 300, tmp_path / "tokenizer", sequence_length=32)
    words = {"tokenizer": str(tmp_path / "tokenizer"), "data_files": [f"{tmp_path}/*.bin"], "separator": "none"}
    args = arguments(split="source", packing=packing, **words)
    prepare(args)
    wanted = [ids[start : start + 33].tolist() for start in range(0, len(ids) - 1, 32)]
    if packing == "concat":
        wanted = [row for row in wanted if len(row) == 33]
    assert load_from_disk(f"{args.dataset_dir}/train")["input_ids"][:] == wanted
    assert max(sizes) <= 97 and sum(sizes) > len(ids)


@pytest.mark.parametrize("split", ["head", "hash", "source"])
def test_validation_text_of_a_mixture_is_read_once_and_kept_no_longer_than_needed(
    arguments, documents: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, split: str
) -> None:
    monkeypatch.setattr(text_files, "PART_BYTES", 5000)
    for name in ("a", "b"):
        for kind, part in (("train", documents[:100]), ("validation", documents[100:])):
            lines = "".join(json.dumps({"text": f"{name} {text}" if text else ""}) + "\n" for text in part)
            (tmp_path / f"{name}-{kind}.jsonl").write_text(lines)
    opened, staged = [], []
    texts, write = StagedPart.texts, prepare_module.write_validation_text
    monkeypatch.setattr(StagedPart, "texts", lambda self: opened.append(self) or texts(self))

    def writes(folder: Path, groups) -> None:
        staged.extend(folder.parents[1].glob("streams/*/*.jsonl"))
        write(folder, groups)

    monkeypatch.setattr(prepare_module, "write_validation_text", writes)
    args = arguments(
        data_files=[],
        source=f"{tmp_path}/a-*.jsonl=0.6,{tmp_path}/b-*.jsonl=0.4",
        split=split,
        validation_fraction=0.2,
        validation_tokens=2000,
        validation_text=True,
    )
    manifest = prepare(args)
    lines = Path(args.dataset_dir, "text", "validation.jsonl").read_text().splitlines()
    kept = [json.loads(line)["text"] for line in lines]
    counts = manifest["counts"]["validation"]
    assert len(kept) == counts["documents"] + counts["empty_documents"] > 4
    assert len(opened) == len({part.path("") for part in opened})
    if split == "source":
        assert kept == [f"{name} {text}" if text else "" for name in "ab" for text in documents[100:]]
        assert {path.parent.name for path in staged} == {"validation-0", "validation-1"}
    else:
        encoder = Encoder(Path(args.dataset_dir, "tokenizer"), separator="before")
        assert sum(map(len, encoder.encode_each(kept))) == counts["tokens"]
    if split == "head":
        assert len(staged) < 8  # of some 30 parts


def test_max_tokens_cuts_at_a_document(arguments) -> None:
    manifest = prepare(arguments(max_tokens=3000), PreparationOptions(num_proc=2))
    tokens = sum(counts["tokens"] for counts in manifest["counts"].values())
    assert 3000 <= tokens < 3000 + 2000
    assert prepare(arguments("one", max_tokens=3000))["sha256"] == manifest["sha256"]


@pytest.mark.parametrize("form", [{}, {"packing": "wrap"}], ids=["concat", "wrap"])
def test_verify_finds_a_changed_bit(arguments, form: dict) -> None:
    args = arguments(**form)
    manifest = prepare(args)
    verify(args.dataset_dir, manifest)
    shard = Path(args.dataset_dir, "train", "data-00000.arrow")
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    with pytest.raises(UserError, match="prepare it anew|does not hold what its manifest says"):
        verify(args.dataset_dir, manifest)


def test_verify_finds_ids_that_moved_to_the_next_row(arguments) -> None:
    args = arguments(packing="wrap")
    manifest = prepare(args)
    rows = load_from_disk(f"{args.dataset_dir}/train")["input_ids"][:]
    shard = Path(args.dataset_dir, "train", "data-00000.arrow")
    content = shard.read_bytes()
    ends = np.cumsum([0, *map(len, rows)]).astype(np.int32)
    assert content.count(ends.tobytes()) == 1
    moved = ends.copy()
    moved[3] -= 1
    shard.write_bytes(content.replace(ends.tobytes(), moved.tobytes()))
    with pytest.raises(UserError, match="prepare it anew|does not hold what its manifest says"):
        verify(args.dataset_dir, manifest)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data_files": ["nowhere/*.txt"]}, "matches no file"),
        ({"data_files": [], "source": "finweb-10bt"}, "did you mean 'fineweb-10bt'?"),
        ({"data_files": [], "source": "files"}, "--data_files GLOB"),
        ({"tokenizer": "train:many"}, "train:4096"),
        ({"tokenizer": "train:100"}, "train:257"),
        ({"validation_tokens": 10**9}, "train has 0 tokens, too few for one row of 33"),
        ({"validation_tokens": 1, "sequence_length": 5000}, "validation has"),
        (
            {"packing": "wrap", "min_length": 4000, "sequence_length": 5000},
            "tokens and no document of 4001 or more: use more text",
        ),
    ],
)
def test_what_cannot_be_prepared_leaves_nothing(arguments, changes: dict, message: str, tmp_path: Path) -> None:
    args = arguments(**changes)
    with pytest.raises(UserError) as error:
        prepare(args)
    assert message in str(error.value)
    assert not list(tmp_path.iterdir())


def test_an_empty_corpus_is_refused(arguments, tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text('{"text": ""}\n')
    with pytest.raises(UserError, match="an empty corpus cannot be prepared"):
        prepare(arguments(data_files=[str(empty)]))
    assert [path.name for path in tmp_path.iterdir()] == ["empty.jsonl"]


def test_staged_tokens_never_vanish_by_a_changed_option(arguments, monkeypatch: pytest.MonkeyPatch) -> None:
    args = arguments("cut")
    with monkeypatch.context() as patch:
        patch.setattr(cutting, "write_rows", lambda *words, **named: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            prepare(args)
    staging = Path(args.dataset_dir + ".staging")
    with pytest.raises(UserError, match="cut.staging holds an interrupted preparation with split_seed 2357, not 5"):
        prepare(arguments("cut", split_seed=5))
    assert len(list(staging.glob("streams/train-0/*.ids"))) == 2
    prepare(args)


def test_every_kind_of_file_gives_the_same_documents(arguments, documents: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "kinds"
    folder.mkdir()
    pyarrow.parquet.write_table(pa.table({"text": documents, "url": ["x"] * len(documents)}), folder / "a.parquet")
    lines = "".join(json.dumps({"text": text}) + "\n" for text in documents)
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    for number, text in enumerate(documents):
        (folder / f"{number:03d}.txt").write_text(text)
    hashes = [
        prepare(arguments(kind.strip("*."), data_files=[str(folder / kind)]), PreparationOptions(num_proc=2))["sha256"]
        for kind in ("*.parquet", "*.jsonl.gz", "*.txt")
    ]
    assert hashes[0] == hashes[1] == hashes[2]


def test_the_embedded_corpus_is_prose_of_this_python() -> None:
    topics = [document for batch in Topics().read() for document in batch.documents]
    modules = [document for batch in Docstrings().read() for document in batch.documents]
    assert len(topics) > 40 and len(modules) > 200
    assert any("lambda" in topic for topic in topics)
    assert any("Return a shallow copy" in module for module in modules)
    size = sum(len(document) for document in topics + modules)
    assert 1e6 < size < 5e6
    assert list(Topics().read()) == list(Topics().read())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"min_length": 5}, "--min_length 5 belongs to --packing wrap"),
        ({"packing": "wrap", "min_length": 33}, "--min_length 33 must lie between 0 and --sequence_length 32"),
        ({"packing": "wrap", "min_length": -1}, "--min_length -1 must lie between 0 and"),
        ({"sequence_length": 0}, "--sequence_length 0 must be at least 1"),
    ],
)
def test_lengths_that_fit_no_packing_are_refused(arguments, changes: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        arguments(**changes)


def test_a_wrapped_folder_as_a_user_types_it(corpus: list[Path], tmp_path: Path, type_command) -> None:
    words = ("python", "prepare_data.py", "--data_files", *corpus, "--dataset_dir", tmp_path / "wrap")
    words += ("--tokenizer", "train:300", "--validation_tokens", "500", "--num_proc", "1", "--packing", "wrap")
    refused = type_command(*words, "--sequence_length", "32", "--min_length", "64")
    assert refused.returncode == 2 and refused.stderr.startswith("error: --min_length 64 must lie between")
    assert not list(tmp_path.iterdir())
    done = type_command(*words, "--sequence_length", "32", "--min_length", "8", "--verify")
    assert done.returncode == 0, done.stderr
    assert "every file is what its manifest says" in done.stdout
    lengths = [len(row) - 1 for row in load_from_disk(str(tmp_path / "wrap" / "train"))["input_ids"]]
    assert (min(lengths), max(lengths)) == (8, 32)
    counts = json.loads((tmp_path / "wrap" / "manifest.json").read_text())["counts"]["train"]
    assert f"{counts['rows']:,} rows, {counts['dropped_tokens']:,} tokens left over" in done.stdout


def test_preparing_imports_no_torch(tiny_recipe: Path, type_command) -> None:
    code = (
        "import sys, prepare_data; prepare_data.main(sys.argv[1:]); "
        "assert not {'torch', 'transformers.training_args'} & sys.modules.keys(), 'torch was imported'"
    )
    done: subprocess.CompletedProcess[str] = type_command("python", "-c", code, tiny_recipe, "--verify")
    assert done.returncode == 0, done.stderr
    assert "every file is what its manifest says" in done.stdout

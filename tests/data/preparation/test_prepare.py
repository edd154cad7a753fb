"""A prepared folder is finished and verified, or absent; the same for any number of workers and any interruption."""

import json
from pathlib import Path

import numpy as np
import pytest
from datasets import load_from_disk
from transformers import AutoTokenizer

from gpt2_repro.data.arguments import PreparationOptions
from gpt2_repro.data.encoder import Encoder
from gpt2_repro.data.preparation import cutting
from gpt2_repro.data.preparation.prepare import prepare
from gpt2_repro.data.shards import verify
from gpt2_repro.data.sources import text_files
from gpt2_repro.data.sources.embedded import Topics, module_docstrings
from gpt2_repro.data.tokenizer import train_tokenizer
from gpt2_repro.errors import UserError


def validation_texts(folder: str) -> list[str]:
    lines = Path(folder, "text", "validation.jsonl").read_text().splitlines()
    return [json.loads(line)["text"] for line in lines]


def test_the_folder_is_what_its_manifest_says(arguments, documents: list[str]) -> None:
    args = arguments()
    manifest = prepare(args)
    assert json.loads(Path(args.dataset_dir, "manifest.json").read_text()) == json.loads(json.dumps(manifest))
    tokenizer = AutoTokenizer.from_pretrained(f"{args.dataset_dir}/tokenizer")
    streams = {}
    for split in ("train", "validation"):
        rows, counts = load_from_disk(f"{args.dataset_dir}/{split}"), manifest["counts"][split]
        features = rows.features["input_ids"]
        assert (features.feature.dtype, features.length) == ("uint16", 33)
        table = np.array(rows["input_ids"])
        assert table.shape == (counts["rows"], 33)
        streams[split] = [*table[:, :-1].ravel(), table[-1, -1]]
        assert len(streams[split]) + counts["dropped_tokens"] == counts["tokens"]
    # llm.c's way: the first documents make the validation set, in order, each behind a separator.
    held_out = [text for text in tokenizer.decode(streams["validation"]).split("<|endoftext|>") if text]
    assert held_out == documents[: len(held_out) - 1] + [held_out[-1]]
    assert documents[len(held_out) - 1].startswith(held_out[-1])
    counts = manifest["counts"].values()
    assert sum(of["documents"] for of in counts) == len(documents) - 1
    assert sum(of["empty_documents"] for of in counts) == 1
    assert max(map(max, streams.values())) <= manifest["largest_id"] < manifest["vocab_size"] == 300
    assert not Path(args.dataset_dir + ".staging").exists()


@pytest.mark.parametrize("form", [{}, {"packing": "wrap", "min_length": 12, "max_tokens": 3000}])
def test_any_number_of_workers_gives_the_same_bytes(arguments, form: dict, content) -> None:
    one, two = arguments("one", **form), arguments("two", **form)
    counts = prepare(one)["counts"].values()
    prepare(two, PreparationOptions(num_proc=2))
    assert content(one.dataset_dir) == content(two.dataset_dir)
    if one.max_tokens:
        assert 3000 <= sum(of["tokens"] for of in counts) < 3000 + 2000


def test_a_finished_folder_is_found_again_and_changed_files_are_named(
    arguments, corpus: list[Path], tmp_path: Path, caplog, content
) -> None:
    path = tmp_path / "grows.jsonl"
    path.write_text('{"text": "one"}\n')
    files = {"data_files": [*map(str, corpus), str(tmp_path / "*.jsonl")]}
    manifest, before = prepare(arguments(**files)), content(tmp_path / "out")
    for text, named in (("one", False), ("one more", True), (None, False)):
        path.unlink() if text is None else path.write_text(json.dumps({"text": text}) + "\n")
        caplog.clear()
        assert prepare(arguments(**files)) == json.loads(json.dumps(manifest))
        assert (str(path) in caplog.text and "--overwrite" in caplog.text) == named
    with pytest.raises(UserError, match="sequence_length 32, not 16"):
        prepare(arguments(**files, sequence_length=16))
    assert content(tmp_path / "out") == before


def test_a_document_is_held_out_by_its_text_alone(arguments, corpus: list[Path], documents: list[str]) -> None:
    form = {"split": "hash", "validation_fraction": 0.2, "validation_text": True}
    all_files, last_file = arguments("all", **form), arguments("last", **form, data_files=[str(corpus[1])])
    manifest, _ = prepare(all_files), prepare(last_file)
    held_out = validation_texts(all_files.dataset_dir)
    assert len(held_out) == manifest["counts"]["validation"]["documents"]
    assert 0.08 < len(held_out) / len(documents) < 0.35
    assert validation_texts(last_file.dataset_dir) == [text for text in held_out if text in documents[50:]]


@pytest.mark.parametrize("packing", ["concat", "wrap"])
def test_a_file_of_one_document_is_never_in_memory_whole(
    arguments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packing: str
) -> None:
    ids = np.random.default_rng(0).integers(0, 257, 10_007).astype(np.uint16)
    ids.tofile(tmp_path / "train.bin")
    ids[:500].tofile(tmp_path / "val.bin")
    sizes = []
    monkeypatch.setattr(cutting, "PIECE_TOKENS", 100)
    short = cutting._short
    monkeypatch.setattr(cutting, "_short", lambda *words: (sizes.append(len(p[0])) or p for p in short(*words)))
    train_tokenizer(["abc"], 300, tmp_path / "tokenizer", sequence_length=32)
    words = {"tokenizer": str(tmp_path / "tokenizer"), "data_files": [f"{tmp_path}/*.bin"], "separator": "none"}
    args = arguments(split="source", packing=packing, **words)
    prepare(args)
    wanted = [ids[start : start + 33].tolist() for start in range(0, len(ids) - 1, 32)]
    kept = [row for row in wanted if len(row) == 33 or packing == "wrap"]
    assert load_from_disk(f"{args.dataset_dir}/train")["input_ids"][:] == kept
    assert max(sizes) <= 97 and sum(sizes) > len(ids)


@pytest.mark.parametrize("split", ["head", "hash", "source"])
def test_validation_text_of_a_mixture_is_that_of_its_rows(
    arguments, documents: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, split: str
) -> None:
    monkeypatch.setattr(text_files, "PART_BYTES", 5000)
    for name in ("a", "b"):
        for kind, part in (("train", documents[:100]), ("validation", documents[100:])):
            lines = "".join(json.dumps({"text": f"{name} {text}" if text else ""}) + "\n" for text in part)
            (tmp_path / f"{name}-{kind}.jsonl").write_text(lines)
    form = {"split": split, "validation_fraction": 0.2, "validation_tokens": 2000, "validation_text": True}
    args = arguments(data_files=[], source=f"{tmp_path}/a-*.jsonl=0.6,{tmp_path}/b-*.jsonl=0.4", **form)
    counts = prepare(args)["counts"]["validation"]
    kept = validation_texts(args.dataset_dir)
    assert len(kept) == counts["documents"] + counts["empty_documents"] > 4
    if split == "source":
        assert kept == [f"{name} {text}" if text else "" for name in "ab" for text in documents[100:]]
    encoder = Encoder(Path(args.dataset_dir, "tokenizer"), separator="before")
    assert sum(map(len, encoder.encode_each(kept))) == counts["tokens"]


def test_verify_finds_a_changed_bit_and_a_changed_file(arguments) -> None:
    args = arguments()
    manifest = prepare(args)
    verify(args.dataset_dir, manifest)
    for name in ("train/data-00000.arrow", "tokenizer/tokenizer.json"):
        path = Path(args.dataset_dir, name)
        content = path.read_bytes()
        path.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
        with pytest.raises(UserError, match=name):
            verify(args.dataset_dir, manifest)
        path.write_bytes(content)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"data_files": ["nowhere/*.txt"]}, "nowhere/"),
        ({"data_files": [__file__]}, "test_prepare.py"),
        ({"data_files": [], "source": "finweb-10bt"}, "'fineweb-10bt'"),
        ({"data_files": [], "source": "files"}, "--data_files"),
        *(({"data_files": [], "source": f"{of},two.jsonl=1"}, of) for of in ("one.jsonl=0", "a=nan", "a", "=1")),
        ({"tokenizer": "train:many"}, "train:4096"),
        ({"tokenizer": "train:100"}, "train:257"),
        ({"tokenizer": "char"}, "--separator none"),
        ({"validation_tokens": 10**9}, "--validation_tokens"),
        ({"validation_tokens": 1, "sequence_length": 5000}, "--sequence_length"),
        ({"packing": "wrap", "min_length": 4000, "sequence_length": 5000}, "--min_length"),
        ({"min_length": 5}, "--packing wrap"),
        ({"packing": "wrap", "min_length": 33}, "--min_length 33"),
        ({"packing": "wrap", "min_length": -1}, "--min_length -1"),
        ({"sequence_length": 0}, "--sequence_length 0"),
        ({"split_seed": -1}, "--split_seed -1"),
        ({"validation_fraction": 1.0}, "--validation_fraction 1.0"),
        ({"split": "source"}, "--split h"),
        ({"validation_sets": ["plain"]}, "NAME=SOURCE"),
        ({"validation_sets": ["Plain=a.txt"]}, "NAME=SOURCE"),
        ({"validation_sets": ["a=embedded", "a=y.txt"]}, "a twice"),
        ({"validation_sets": ["a=nothing.txt"]}, "nothing.txt"),
        ({"validation_sets": ["a=embeded"]}, "'embedded'"),
        ({"dataset_dir": "."}, "--dataset_dir ."),
        ({"dataset_dir": "/dev/null/out"}, "/dev/null/out"),
    ],
)
def test_a_mistake_is_named_and_leaves_nothing(arguments, changes: dict, named: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        prepare(arguments(**changes))
    assert named in str(error.value)
    assert not list(tmp_path.iterdir())


def test_the_embedded_corpus_is_prose_of_this_python() -> None:
    topics = [document for batch in Topics().read() for document in batch.documents]
    assert len(topics) > 40 and any("lambda" in topic for topic in topics)
    assert "Implementation of JSONEncoder" in module_docstrings(Path(json.encoder.__file__))


def test_preparing_imports_no_torch_and_prints_what_it_made(corpus: list[Path], tmp_path: Path, type_command) -> None:
    code = "import sys, prepare_data; prepare_data.main(sys.argv[1:]); assert 'torch' not in sys.modules"
    words = ("--data_files", *corpus, "--dataset_dir", tmp_path / "wrap", "--tokenizer", "train:300", "--verify")
    form = ("--num_proc", 1, "--packing", "wrap", "--sequence_length", 32, "--min_length", 8)
    done = type_command("python", "-c", code, *words, *form, "--validation_tokens", 500)
    assert done.returncode == 0, done.stderr
    assert "every file is what its manifest says" in done.stdout
    lengths = [len(row) - 1 for row in load_from_disk(str(tmp_path / "wrap" / "train"))["input_ids"]]
    assert (min(lengths), max(lengths)) == (8, 32)
    counts = json.loads((tmp_path / "wrap" / "manifest.json").read_text())["counts"]["train"]
    assert f"{counts['rows']:,} rows" in done.stdout

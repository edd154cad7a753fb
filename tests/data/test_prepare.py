"""A prepared folder is finished and verified, or absent; the same for any number of workers and any interruption."""

import gzip
import hashlib
import json
import subprocess
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from datasets import load_from_disk
from transformers import AutoTokenizer

from gpt2_repro.data import prepare as prepare_module
from gpt2_repro.data.arguments import DataArguments
from gpt2_repro.data.embedded import Docstrings, Topics
from gpt2_repro.data.files import LocalFile
from gpt2_repro.data.prepare import prepare
from gpt2_repro.data.rows import verify
from gpt2_repro.data.staging import tokenize_files
from gpt2_repro.data.tokenizer import Encoder, train_tokenizer
from gpt2_repro.errors import UserError
from gpt2_repro.recipe import TokenCount


def rows(folder: str | Path, split: str) -> np.ndarray:
    return load_from_disk(str(Path(folder, split))).with_format("numpy")["input_ids"][:]


def test_the_folder_is_what_its_manifest_says(arguments, documents: list[str]) -> None:
    args = arguments()
    manifest = prepare(args, num_proc=1)
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
    manifest = prepare(args, num_proc=1)
    encoded = [
        ids.tolist() for ids in Encoder(Path(args.dataset_dir, "tokenizer"), separator=separator).encode(documents)
    ]
    held_out = next(n for n in range(len(encoded)) if sum(map(len, encoded[:n])) >= 500)
    hashes = {}
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
        content = b"".join(np.array(row, np.uint16).tobytes() for row in wanted)
        lengths = np.array([len(row) for row in wanted], np.uint32).tobytes()
        hashes[split] = hashlib.sha256(content + lengths).hexdigest()
    assert manifest["sha256"] == hashes
    assert (manifest["request"]["packing"], manifest["request"]["min_length"]) == ("wrap", 12)
    assert manifest["reference_losses"]["bigram"] < manifest["reference_losses"]["unigram"]
    verify(args.dataset_dir, manifest)


@pytest.mark.parametrize("form", [{}, {"packing": "wrap", "min_length": 12}], ids=["concat", "wrap"])
def test_any_number_of_workers_gives_the_same_bytes(arguments, form: dict) -> None:
    one = prepare(arguments("one", **form), num_proc=1)
    two = prepare(arguments("two", **form), num_proc=2)
    assert one["sha256"] == two["sha256"] and one["counts"] == two["counts"]
    shards = [sorted(Path(arguments(name).dataset_dir, "train").glob("*.arrow")) for name in ("one", "two")]
    assert [path.read_bytes() for path in shards[0]] == [path.read_bytes() for path in shards[1]]


def test_an_interruption_changes_nothing_and_loses_nothing(arguments, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = prepare(arguments("whole"), num_proc=1)
    args = arguments("cut")
    with monkeypatch.context() as patch:
        patch.setattr(prepare_module, "write_rows", lambda *words, **named: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            prepare(args, num_proc=1)
    assert not Path(args.dataset_dir).exists()
    staged = sorted(Path(args.dataset_dir + ".staging").glob("tokens-*.npz"))
    assert len(staged) == 2
    before = [path.stat().st_mtime_ns for path in staged]
    staged[1].unlink()
    taken_up = []
    tokenize = prepare_module.tokenize_files
    with monkeypatch.context() as patch:

        def watched(*words, **named):
            taken_up.append(staged[0].stat().st_mtime_ns == before[0])
            return tokenize(*words, **named)

        patch.setattr(prepare_module, "tokenize_files", watched)
        assert prepare(args, num_proc=1)["sha256"] == whole["sha256"]
    assert taken_up == [True]


def test_a_finished_folder_is_found_again_and_another_request_refused(arguments) -> None:
    args = arguments()
    first = prepare(args, num_proc=1)
    stamp = Path(args.dataset_dir, "manifest.json").stat().st_mtime_ns
    assert prepare(args, num_proc=1) == json.loads(json.dumps(first))
    assert Path(args.dataset_dir, "manifest.json").stat().st_mtime_ns == stamp
    with pytest.raises(UserError, match="sequence_length 32, not 16"):
        prepare(arguments(sequence_length=16), num_proc=1)


def test_hash_split_is_by_document_and_disjoint(arguments, documents: list[str]) -> None:
    args = arguments(split="hash", validation_fraction=0.2, validation_text=True)
    manifest = prepare(args, num_proc=1)
    lines = Path(args.dataset_dir, "text", "validation.jsonl").read_text().splitlines()
    held_out = [json.loads(line)["text"] for line in lines]
    assert len(held_out) == manifest["counts"]["validation"]["documents"] and set(held_out) < set(documents)
    assert 0.08 < len(held_out) / len(documents) < 0.35
    reversed_files = arguments("other", split="hash", validation_fraction=0.2, validation_text=True)
    reversed_files.data_files = reversed_files.data_files[1:]
    prepare(reversed_files, num_proc=1)
    again = Path(reversed_files.dataset_dir, "text", "validation.jsonl").read_text().splitlines()
    assert set(again) < set(lines)  # a document's place is its own, whatever else there is


def test_max_tokens_cuts_at_a_document(arguments) -> None:
    manifest = prepare(arguments(max_tokens=3000), num_proc=2)
    tokens = sum(counts["tokens"] for counts in manifest["counts"].values())
    assert 3000 <= tokens < 3000 + 2000
    assert prepare(arguments("one", max_tokens=3000), num_proc=1)["sha256"] == manifest["sha256"]


@pytest.mark.parametrize("form", [{}, {"packing": "wrap"}], ids=["concat", "wrap"])
def test_verify_finds_a_changed_bit(arguments, form: dict) -> None:
    args = arguments(**form)
    manifest = prepare(args, num_proc=1)
    verify(args.dataset_dir, manifest)
    shard = Path(args.dataset_dir, "train", "data-00000.arrow")
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    with pytest.raises(UserError, match="prepare it anew"):
        verify(args.dataset_dir, manifest)


def test_verify_finds_ids_that_moved_to_the_next_row(arguments) -> None:
    args = arguments(packing="wrap")
    manifest = prepare(args, num_proc=1)
    rows = load_from_disk(f"{args.dataset_dir}/train")["input_ids"][:]
    shard = Path(args.dataset_dir, "train", "data-00000.arrow")
    content = shard.read_bytes()
    ends = np.cumsum([0, *map(len, rows)]).astype(np.int32)
    assert content.count(ends.tobytes()) == 1
    moved = ends.copy()
    moved[3] -= 1
    shard.write_bytes(content.replace(ends.tobytes(), moved.tobytes()))
    with pytest.raises(UserError, match="prepare it anew"):
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
        prepare(args, num_proc=1)
    assert message in str(error.value)
    assert not list(tmp_path.iterdir())


def test_an_empty_corpus_is_refused(arguments, tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text('{"text": ""}\n')
    with pytest.raises(UserError, match="an empty corpus cannot be prepared"):
        prepare(arguments(data_files=[str(empty)]), num_proc=1)
    assert [path.name for path in tmp_path.iterdir()] == ["empty.jsonl"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"text\nx\n", "is no .txt, .jsonl or .parquet file"),
        ("a.jsonl", b'{"text": "x"}\n\n{"body": "y"}\n', "line 3, is no JSON object with a text under the key `text`"),
        ("a.jsonl", b'{"text": 5}\n', "line 1"),
        ("a.jsonl", b"not json\n", "line 1"),
        ("a.txt", "naïve".encode("latin-1"), "a.txt cannot be read"),
        ("a.txt.gz", b"no gzip at all", "a.txt.gz cannot be read"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "x"}\n' * 1000)[:-20], "a.jsonl.gz cannot be read"),
        ("a.parquet", b"PAR1 and nothing else", "a.parquet cannot be read"),
    ],
)
def test_files_that_cannot_be_read_are_named(
    arguments, tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        prepare(arguments(data_files=[str(path)]), num_proc=1)
    assert [left.name for left in tmp_path.iterdir()] == [name]


def test_staged_tokens_never_vanish_by_a_changed_option(arguments, monkeypatch: pytest.MonkeyPatch) -> None:
    args = arguments("cut")
    with monkeypatch.context() as patch:
        patch.setattr(prepare_module, "write_rows", lambda *words, **named: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            prepare(args, num_proc=1)
    staging = Path(args.dataset_dir + ".staging")
    with pytest.raises(UserError, match="cut.staging holds an interrupted preparation with split_seed 2357, not 5"):
        prepare(arguments("cut", split_seed=5), num_proc=1)
    assert len(list(staging.glob("tokens-*.npz"))) == 2
    prepare(args, num_proc=1)


class SlowFile(LocalFile):
    """A file that takes a worker longer than a starved main process needs to call the others off."""

    def read(self):
        time.sleep(2)
        yield from super().read()


def test_files_beyond_enough_tokens_are_left_alone(documents: list[str], tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.txt" for number in range(12)]
    for path in paths:
        path.write_text(" ".join(documents[:40]))
    train_tokenizer(documents, 300, tmp_path / "tokenizer", sequence_length=32)
    args = DataArguments(data_files=list(map(str, paths)), sequence_length=32, max_tokens=TokenCount(100))
    files = [LocalFile(str(paths[0])), *(SlowFile(str(path)) for path in paths[1:])]
    staged = tokenize_files(files, tmp_path, tmp_path / "tokenizer", args, num_proc=2)
    assert len(staged) == 1
    assert len(list(tmp_path.glob("tokens-*.npz"))) < 12


def test_every_kind_of_file_gives_the_same_documents(arguments, documents: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "kinds"
    folder.mkdir()
    pyarrow.parquet.write_table(pa.table({"text": documents, "url": ["x"] * len(documents)}), folder / "a.parquet")
    lines = "".join(json.dumps({"text": text}) + "\n" for text in documents)
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    for number, text in enumerate(documents):
        (folder / f"{number:03d}.txt").write_text(text)
    hashes = [
        prepare(arguments(kind.strip("*."), data_files=[str(folder / kind)]), num_proc=2)["sha256"]
        for kind in ("*.parquet", "*.jsonl.gz", "*.txt")
    ]
    assert hashes[0] == hashes[1] == hashes[2]


def test_the_embedded_corpus_is_prose_of_this_python() -> None:
    topics = [document for batch, _ in Topics().read() for document in batch]
    modules = [document for batch, share in Docstrings().read() for document in batch if 0 < share <= 1]
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
    assert "every row is what its manifest says" in done.stdout
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
    assert "every row is what its manifest says" in done.stdout

"""Each contender of the data preparation benchmark leaves the tokens that its method says, by a second tokenizer."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from datasets import load_from_disk
from tokenizers import Tokenizer

from benchmarks.preparation_contenders import END_OF_TEXT, count, llmc_ids, nanogpt_ids
from benchmarks.preparation_corpus import cut, write_corpus
from benchmarks.preparation_table import Measured, agreed_tokens, table


ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """Documents of 1 to some 1,700 tokens; the longest make several windows of 512."""
    sentence = "It's 1,024 tokens  wide; naïve Füße, 日本語 🙂 and\n\n\ttabs — don't they'll? "
    return ["short", *(sentence * number for number in (1, 2, 7, 12, 20, 33, 50)), "x", sentence[3:] * 15]


@pytest.fixture(scope="module")
def left(texts: list[str], real_data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What each contender leaves of the same texts, two files each; they run beside each other."""
    pytest.importorskip("tiktoken", reason="no tiktoken: pip install -r requirements-dev.txt")
    folder = tmp_path_factory.mktemp("contenders")
    write_corpus(folder / "corpus", texts, copies=1, files=2, compression="zstd")
    environment = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    gpt2, ours = str(real_data / "gpt2"), ["--dataset_dir", str(folder / "ours" / "data"), "--sequence_length", "64"]
    ours += ["--data_files", str(folder / "corpus" / "*.parquet"), "--tokenizer", gpt2]
    command = [sys.executable, "prepare_data.py", *ours, "--num_proc", "1", "--validation_tokens", "500"]
    running = {"ours": subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)}
    for name, kind, ending in (
        ("blog", "json", "jsonl"),
        ("nanogpt", "parquet", "parquet"),
        ("llmc", "json", "jsonl"),
    ):
        job = {
            "kind": kind,
            "tokenizer": str(real_data / "gpt2"),
            "folder": str(folder / name / "data"),
            "processes": 2,
        }
        job["files"] = [str(path) for path in sorted((folder / "corpus").glob(f"*.{ending}"))]
        command = [sys.executable, "-m", "benchmarks.preparation_contenders", name, json.dumps(job)]
        own = environment | {"HF_HOME": str(folder / name / "cache")}
        running[name] = subprocess.Popen(command, cwd=ROOT, env=own, stderr=subprocess.PIPE, text=True)
    for process in running.values():
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors[-3000:]
    return {name: folder / name / "data" for name in running}


@pytest.fixture(scope="module")
def expected(texts: list[str], real_data: Path) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(real_data / "gpt2" / "tokenizer.json"))
    return [document.ids for document in tokenizer.encode_batch(texts)]


@pytest.mark.slow
def test_llmc_puts_the_separator_before(left: dict[str, Path], expected: list[list[int]]) -> None:
    (ids,) = llmc_ids(left["llmc"])
    assert ids.tolist() == [token for document in expected for token in (END_OF_TEXT, *document)]
    assert [path.name for path in left["llmc"].iterdir()] == ["val_000000.bin"]
    assert count("llmc", left["llmc"]) == {"text_tokens": sum(map(len, expected)), "separators": len(expected)}


@pytest.mark.slow
def test_nanogpt_puts_the_separator_after_shuffled_documents(left: dict[str, Path], expected: list[list[int]]) -> None:
    documents = []
    for ids in nanogpt_ids(left["nanogpt"]).values():
        assert ids[-1] == END_OF_TEXT
        parts = np.split(ids[:-1], np.flatnonzero(ids[:-1] == END_OF_TEXT))
        documents += [part[part != END_OF_TEXT].tolist() for part in parts]
    assert sorted(documents) == sorted(expected)
    assert count("nanogpt", left["nanogpt"])["text_tokens"] == sum(map(len, expected))


@pytest.mark.slow
def test_the_blog_keeps_long_windows_and_pads_them(left: dict[str, Path], expected: list[list[int]]) -> None:
    windows = [ids[start : start + 512] for ids in expected for start in range(0, len(ids), 512)]
    kept = [window for window in windows if len(window) >= 256]
    assert 0 < len(kept) < len(windows)
    found, padding = [], 0
    for row in load_from_disk(str(left["blog"])):
        length = sum(row["attention_mask"])
        assert row["attention_mask"] == [1] * length + [0] * (len(row["input_ids"]) - length)
        assert set(row["input_ids"][length:]) <= {END_OF_TEXT}
        found.append(row["input_ids"][:length])
        padding += len(row["input_ids"]) - length
    assert sorted(found) == sorted(kept) and padding > 0
    assert count("blog", left["blog"]) == {"text_tokens": sum(map(len, kept)), "separators": 0, "padding": padding}


@pytest.mark.slow
def test_this_project_keeps_all_tokens(left: dict[str, Path], expected: list[list[int]]) -> None:
    found = count("ours", left["ours"])
    assert (found["text_tokens"], found["separators"]) == (sum(map(len, expected)), len(expected))


def test_the_corpus_is_the_same_in_both_forms(texts: list[str], tmp_path: Path) -> None:
    sizes = write_corpus(tmp_path / "corpus", texts, copies=3, files=4, compression="snappy")
    read: dict[str, list[str]] = {"parquet": [], "jsonl": []}
    for path in sorted((tmp_path / "corpus").glob("*")):
        if path.suffix == ".parquet":
            read["parquet"] += pa.parquet.read_table(path)["text"].to_pylist()
        else:
            read["jsonl"] += [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]
    assert read["parquet"] == read["jsonl"] == texts * 3
    assert sum(sizes) == 3 * sum(len(text.encode()) for text in texts)


def test_a_novel_is_cut_at_paragraphs() -> None:
    novel = "\n\n".join(f"Paragraph {number}. " + "word " * (number % 200) for number in range(400))
    pieces = cut(novel)
    assert "".join(pieces) == novel
    assert all(piece.endswith("\n\n") for piece in pieces[:-1])
    assert 4000 < np.mean([len(piece.encode()) for piece in pieces[:-1]]) < 5000


def test_the_table_divides_what_was_measured() -> None:
    def of(seconds: list[float], tokens: int) -> list[Measured]:
        counts = {"text_tokens": tokens, "separators": 0}
        return [Measured(second, 2_000_000_000, 1_000_000_000, 7_000_000, 2 * tokens, counts) for second in seconds]

    of_kind = {
        "ours": {2: of([2.0, 2.0], 1_000_000), 8: of([4.0, 3.0], 4_000_000)},
        "llmc": {2: of([4.0, 4.0], 1_000_000), 8: of([10.0, 11.0], 4_000_000)},
    }
    tokens = agreed_tokens({"parquet": of_kind})
    assert tokens == {2: 1_000_000, 8: 4_000_000}
    rows = [
        line.strip("| ").split(" | ") for line in table(of_kind, {2: 5_000_000, 8: 21_000_000}, tokens).splitlines()
    ]
    assert rows[2][1:7] == ["3.5 (3.0 to 4.0)", "6.00", "1,142,857", "10.67", "1.00", "1.00"]
    assert rows[3][1:7] == ["10.5 (10.0 to 11.0)", "2.00", "380,952", "2.46", "3.00", "4.33"]
    assert rows[2][7:] == ["2.00 GB (1.00)", "2.00", "7 MB"]
    of_kind["llmc"][8][0].counts["text_tokens"] += 1
    with pytest.raises(SystemExit, match="8 files differ"):
        agreed_tokens({"parquet": of_kind})

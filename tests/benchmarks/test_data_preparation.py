"""Every benchmarked way to prepare data writes the expected number of tokens."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer

import prepare_data
from benchmarks.preparation_contenders import count
from benchmarks.preparation_corpus import write_corpus


ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_contenders_write_the_expected_tokens(real_data: Path, tmp_path: Path) -> None:
    """All contenders write all tokens, except for the method of the blog post.

    The method of suzyahyah's blog post drops windows of fewer than 256 tokens.
    """
    pytest.importorskip("tiktoken", reason="tiktoken is missing: pip install -r requirements-dev.txt")
    sentence = "It's 1,024 tokens  wide; naïve Füße, 日本語 🙂 and\n\n\ttabs — don't they'll? "
    texts = [
        "short",
        *(sentence * number for number in (1, 2, 7, 12, 20, 33, 50)),
        "x",
        sentence[3:] * 15,
    ]  # to 1,700 tokens
    gpt2 = str(real_data / "gpt2")
    write_corpus(tmp_path / "corpus", texts, copies=1, files=2, compression="zstd")
    ours = ["--dataset_dir", str(tmp_path / "ours" / "data"), "--sequence_length", "64", "--validation_tokens", "500"]
    prepare_data.main([*ours, "--data_files", str(tmp_path / "corpus" / "*.parquet"), "--tokenizer", gpt2])
    for name, kind, ending in (
        ("blog", "json", "jsonl"),
        ("nanogpt", "parquet", "parquet"),
        ("llmc", "json", "jsonl"),
    ):
        files = [str(path) for path in sorted((tmp_path / "corpus").glob(f"*.{ending}"))]
        job = {
            "kind": kind,
            "tokenizer": gpt2,
            "folder": str(tmp_path / name / "data"),
            "processes": 2,
            "files": files,
        }
        command = [sys.executable, "-m", "benchmarks.preparation_contenders", name, json.dumps(job)]
        environment = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "HF_HOME": str(tmp_path / name / "cache")}
        subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=120)
    counted = {name: count(name, tmp_path / name / "data") for name in ("ours", "blog", "nanogpt", "llmc")}
    lengths = [len(of.ids) for of in Tokenizer.from_file(f"{gpt2}/tokenizer.json").encode_batch(texts)]
    for name in ("ours", "nanogpt", "llmc"):
        assert counted[name].items() >= {"text_tokens": sum(lengths), "separators": len(texts)}.items()
    windows = [min(512, length - start) for length in lengths for start in range(0, length, 512)]
    kept = sum(window for window in windows if window >= 256)
    assert 0 < kept < sum(windows) and counted["blog"]["padding"] > 0
    assert (counted["blog"]["text_tokens"], counted["blog"]["separators"]) == (kept, 0)

"""Every benchmarked way to prepare data writes the expected number of tokens."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from benchmarks.data_preparation import NAMES, Job, run, write_corpus


@pytest.mark.slow
def test_contenders_write_the_expected_tokens(real_data: Path, tmp_path: Path, monkeypatch) -> None:
    pytest.importorskip("tiktoken", reason="tiktoken is missing: pip install -r requirements-dev.txt")
    monkeypatch.setenv("HF_HOME", "")  # restored after the test
    sentence = "It's 1,024 tokens  wide; naïve Füße, 日本語 🙂 and\n\n\ttabs — don't they'll? "
    long = [sentence * number for number in (1, 2, 7, 12, 20, 33, 50)]  # to 1,700 tokens
    texts = ["short", *long, "x", sentence[3:] * 15] * 4
    write_corpus(tmp_path / "corpus", texts, files=2)
    lengths = [len(each.ids) for each in Tokenizer.from_file(f"{real_data}/gpt2/tokenizer.json").encode_batch(texts)]
    for name in NAMES:
        kind, ending = ("json", "jsonl") if name == "llmc" else ("parquet", "parquet")
        files = sorted(map(str, (tmp_path / "corpus").glob(f"*.{ending}")))
        measured = run(
            name, Job(kind, files, f"{real_data}/gpt2", f"{tmp_path}/work/data", 2), tmp_path / "work", 1500
        )
        assert measured.counts == {"tokens": sum(lengths), "separators": len(texts)}
        assert measured.seconds > 0 and measured.memory > 0 and measured.disk > 0

"""Characters as tokens: nanoGPT's Shakespeare, prepared, trained on and sampled from."""

from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

import prepare_data
from gpt2_repro.data.arguments import DataArguments
from gpt2_repro.data.preparation.prepare import prepare
from gpt2_repro.data.rows import open_rows
from gpt2_repro.data.sources import small_texts
from gpt2_repro.data.tokenizer import count_characters
from gpt2_repro.errors import UserError
from gpt2_repro.model.export import start_ids


def test_ids_are_the_characters_in_their_order(tmp_path: Path, documents: list[str]) -> None:
    count_characters(documents, tmp_path, sequence_length=32)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    characters = sorted(set("".join(documents)))
    for document in [*documents, "\n ".join(documents[:2]).replace("\n", documents[0][0])]:
        ids = tokenizer(document)["input_ids"]
        assert ids == [characters.index(character) for character in document]
        assert tokenizer.decode(ids) == document
    for prompt, named in (("~", "'~'"), ("", "--sample_prompt")):
        with pytest.raises(UserError, match=named):
            start_ids(tokenizer, prompt, window=32)


def test_shakespeare_is_nanogpt_s(real_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = real_data / "tinyshakespeare" / "input.txt"
    monkeypatch.setattr(small_texts, "URL", path.as_uri())
    form = ("--separator", "none", "--split", "source", "--sequence_length", "64", "--num_proc", "1")
    words = ("--source", "tiny-shakespeare", "--tokenizer", "char", "--dataset_dir", str(tmp_path / "out"))
    prepare_data.main([*words, *form])
    text = path.read_text()
    characters = sorted(set(text))
    wanted = np.array([characters.index(character) for character in text])
    assert len(characters) == 65
    for split, part in (("train", wanted[:1_003_854]), ("validation", wanted[1_003_854:])):
        rows = open_rows(tmp_path / "out" / split).joined()[0].reshape(-1, 65)
        assert [*rows[:, :-1].ravel(), rows[-1, -1]] == part[: len(rows) * 64 + 1].tolist()
    # Another text under the same address is not taken for it.
    monkeypatch.setattr(small_texts, "SHA256", "0" * 64)
    args = DataArguments(source="tiny-shakespeare", tokenizer="char", dataset_dir=str(tmp_path / "other"))
    with pytest.raises(UserError, match="--data_files"):
        prepare(args)
    assert not (tmp_path / "other.staging").exists()

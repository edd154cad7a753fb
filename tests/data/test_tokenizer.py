"""Ids equal a second tokenizer's; separators are added by id; text that spells one stays text."""

import json
import shutil
from pathlib import Path
from typing import Literal

import pytest
from transformers import AutoTokenizer

from gpt2_repro.data.encoder import Encoder
from gpt2_repro.data.tokenizer import save_tokenizer, train_tokenizer
from gpt2_repro.errors import UserError


@pytest.fixture(scope="module")
def trained(documents: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    train_tokenizer(documents, 300, folder, sequence_length=32)
    return folder


def test_a_trained_tokenizer_loads_and_knows_every_byte(trained: Path, documents: list[str]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(trained)
    assert len(tokenizer) == 300
    assert tokenizer.eos_token_id == tokenizer.bos_token_id == 299
    for document in documents:
        assert tokenizer.decode(tokenizer(document)["input_ids"]) == document


def test_ids_equal_transformers(trained: Path, documents: list[str]) -> None:
    reference = AutoTokenizer.from_pretrained(trained)
    plain = [document for document in documents if "<|endoftext|>" not in document]
    encoded = Encoder(trained, separator="none").encode_each(plain)
    assert [ids.tolist() for ids in encoded] == [reference(document)["input_ids"] for document in plain]


def test_separators_are_ids_and_text_is_text(trained: Path) -> None:
    texts = ["abc <|endoftext|> def", "", "abc"]
    by_place = {place: Encoder(trained, separator=place).encode_each(texts) for place in ("before", "after", "none")}
    for spelled, empty, short in by_place.values():
        assert len(empty) == 0
        assert (spelled == 299).sum() == (short == 299).sum() <= 1
    assert by_place["before"][2].tolist() == [299, *by_place["none"][2]]
    assert by_place["after"][2].tolist() == [*by_place["none"][2], 299]
    tokenizer = AutoTokenizer.from_pretrained(trained)
    assert tokenizer.decode(by_place["none"][0]) == texts[0]


def test_a_folder_without_a_fast_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(UserError, match="has no tokenizer.json"):
        save_tokenizer(str(tmp_path), tmp_path / "out", sequence_length=32)


@pytest.fixture
def saved(trained: Path, tmp_path: Path) -> Path:
    return shutil.copytree(trained, tmp_path / "saved")


def change(folder: Path, **changes: object) -> dict:
    path = folder / "tokenizer.json"
    description = json.loads(path.read_text()) | changes
    path.write_text(json.dumps(description))
    return description


@pytest.mark.parametrize("engine", ["auto", "tokenizers"])
def test_documents_are_neither_cut_nor_filled_up(
    trained: Path, saved: Path, documents: list[str], engine: Literal["auto", "tokenizers"]
) -> None:
    change(
        saved,
        truncation={"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0},
        padding={
            "strategy": {"Fixed": 64},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "!",
        },
    )
    encoded = Encoder(saved, separator="before", engine=engine).encode_each(documents)
    wanted = Encoder(trained, separator="before", engine=engine).encode_each(documents)
    assert [ids.tolist() for ids in encoded] == [ids.tolist() for ids in wanted]
    assert Encoder(saved, separator="before", engine=engine).agrees(documents[0])


@pytest.mark.parametrize("engine", ["auto", "tokenizers"])
def test_ids_with_a_gap_keep_their_width(
    trained: Path, saved: Path, documents: list[str], engine: Literal["auto", "tokenizers"]
) -> None:
    model = json.loads((saved / "tokenizer.json").read_text())["model"]
    model["vocab"]["a"] = 70_000
    change(saved, model=model)
    encoder = Encoder(saved, separator="none", engine=engine)
    assert encoder.vocab_size == 70_001 and encoder.dtype == "uint32"
    assert encoder.encode(["a"])[0].tolist() == [70_000]


@pytest.mark.parametrize(
    ("file", "content"),
    [("tokenizer.json", "{"), ("tokenizer.json", '{"model": 1}'), ("tokenizer_config.json", "{")],
)
def test_a_tokenizer_that_cannot_be_read_is_named(saved: Path, tmp_path: Path, file: str, content: str) -> None:
    (saved / file).write_text(content)
    with pytest.raises(UserError, match=f"the tokenizer {saved} cannot be read"):
        save_tokenizer(str(saved), tmp_path / "out", sequence_length=32)


def test_a_tokenizer_that_cannot_be_fetched_says_what_to_type(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="--tokenizer FOLDER"):
        save_tokenizer("nobody/nothing-at-all", tmp_path / "out", sequence_length=32)


def test_gpt2_ids_of_real_text(real_data: Path, tmp_path: Path) -> None:
    save_tokenizer(str(real_data / "gpt2"), tmp_path, sequence_length=1024)
    text = (real_data / "tinyshakespeare" / "input.txt").read_text()
    ids, _ = Encoder(tmp_path, separator="none").encode([text])
    assert len(ids) == 338_025  # what nanoGPT's prepare.py counts
    assert ids.dtype == "uint16"
    reference = AutoTokenizer.from_pretrained(real_data / "gpt2")
    assert ids[:5000].tolist() == reference(text)["input_ids"][:5000]
    saved = AutoTokenizer.from_pretrained(tmp_path)
    assert saved.eos_token_id == 50_256 and len(saved) == 50_257
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["model_max_length"] == 1024

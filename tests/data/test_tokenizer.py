"""Token ids equal those of transformers.

For the characters of Tiny Shakespeare, the token ids equal those of nanoGPT. With GPT-2's tokenizer, the number of
token ids equals that of nanoGPT.
"""

import json
import shutil
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from datasets import load_from_disk
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

import prepare_data
from gpt2_repro.data import tokenizer as own
from gpt2_repro.data.arguments import DataArguments
from gpt2_repro.data.preparation.prepare import prepare
from gpt2_repro.data.rows import open_rows
from gpt2_repro.data.sources import small_texts
from gpt2_repro.data.tokenizer import Encoder, obtain_tokenizer
from gpt2_repro.errors import UserError
from gpt2_repro.tokenization import start_ids
from tests.reference import encode_each


@pytest.fixture(scope="module")
def trained(documents: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "tokenizer"
    obtain_tokenizer(DataArguments(tokenizer="train:300", sequence_length=32), folder, lambda: documents, 0)
    return folder


def test_a_trained_tokenizer_knows_every_byte_and_gives_transformers_ids(trained: Path, documents: list[str]) -> None:
    reference = AutoTokenizer.from_pretrained(trained)
    assert len(reference) == 300 and reference.eos_token_id == reference.bos_token_id == 299
    encoded = encode_each(Encoder(trained, separator="none"), documents)
    for document, ids in zip(documents, encoded, strict=True):
        assert reference.decode(ids) == document
        assert "<|endoftext|>" in document or ids.tolist() == reference(document)["input_ids"]


def plain_merges(documents: list[str], vocab_size: int) -> list[list[str]]:
    """Train a byte-level BPE on complete documents, and return its merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size - 1, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(documents, trainer)
    return json.loads(tokenizer.to_str())["model"]["merges"]


@pytest.mark.parametrize("piece", [1, 40, 2**20])
def test_pieces_of_text_with_spaces_give_the_same_tokenizer(trained: Path, documents, monkeypatch, piece: int) -> None:
    monkeypatch.setattr(own, "PIECE", piece)
    spaces = ["  two\u3000and  three\n\n\tfour\x1c five's  ", "\n  " * 30, "x" * 900 + " a\n b " * 9]
    tokenizer = own.train_tokenizer(own.training_text(documents + spaces), 400)
    assert json.loads(tokenizer.to_str())["model"]["merges"] == plain_merges(documents + spaces, 400)
    assert len([*own.training_text(documents)]) > len(documents) or piece > 40


def words_of_trainer(texts: list[str]) -> list[str]:
    split = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str
    return [word for text in texts for word, _ in split(text)]


def test_text_without_spaces_is_bounded(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    draw = np.random.default_rng(0)
    paragraphs = ["".join(map(chr, draw.integers(0x4E00, 0x9FA5, 400))) for _ in range(200)]
    long = "".join(paragraphs[:50])  # 20,000 characters without a space
    monkeypatch.setattr(own, "PIECE", 3000)
    texts = [*own.training_text([long, *paragraphs])]
    words = words_of_trainer(texts)
    assert "".join(texts) == long + "".join(paragraphs)  # below both limits, all text is used
    assert max(map(len, words)) <= 3 * own.LONGEST_WORD  # a character has three bytes
    monkeypatch.setattr(own, "DISTINCT_BYTES", 30_000)
    texts = [*own.training_text([long, *paragraphs])]
    distinct = sum(map(len, set(words_of_trainer(texts))))
    assert 30_000 <= distinct < 30_000 + 3 * own.LONGEST_WORD
    assert "".join(texts) == long[: len("".join(texts))]  # the limit also holds within a document
    repeated = [*own.training_text([paragraphs[0]] * 300)]
    assert repeated == [paragraphs[0]] * 300  # only distinct words need memory
    monkeypatch.setattr(own, "TRAINING_BYTES", 50_000)
    texts = [*own.training_text([paragraphs[0]] * 300)]
    assert 50_000 <= len("".join(texts).encode()) < 50_000 + 1200  # bytes, not characters


def test_characters_are_counted_in_constant_memory() -> None:
    text = "".join(map(chr, range(0x4E00, 0x4E00 + 400)))

    def peak(count: int) -> int:
        documents = (text[number % 7 :] for number in range(count))
        tracemalloc.start()
        own.count_characters(documents)
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    peak(10)  # imports
    assert peak(2000) < peak(20) + 20_000


def test_ids_without_text(tmp_path: Path) -> None:
    ids = np.random.default_rng(0).integers(0, 40, 3000).astype(np.uint16)
    ids.tofile(tmp_path / "music.bin")
    words = {"data_files": [str(tmp_path / "music.bin")], "separator": "none", "sequence_length": 16}
    words |= {"validation_tokens": 200, "dataset_dir": str(tmp_path / "rows")}
    data = prepare(DataArguments(tokenizer="none:40", **words))
    assert data.manifest.vocab_size == 40
    for split, first in (("validation", 0), ("train", 200)):
        rows = np.array(load_from_disk(data.path / split)[:]["input_ids"])
        assert rows[:, :-1].ravel().tolist() == ids[first : first + len(rows) * 16].tolist() and len(rows) > 5
    tokenizer = AutoTokenizer.from_pretrained(data.path / "tokenizer")
    assert start_ids(tokenizer, "17 4 4") == [17, 4, 4] and tokenizer.decode([17, 4, 39]) == "17 4 39"
    with pytest.raises(UserError, match="Cannot encode"):
        start_ids(tokenizer, "40")


@pytest.fixture
def saved(trained: Path, tmp_path: Path) -> Path:
    return shutil.copytree(trained, tmp_path / "saved")


@pytest.mark.parametrize("engine", ["auto", "tokenizers"])
def test_documents_are_neither_cut_nor_filled_up(trained: Path, saved: Path, documents: list[str], engine) -> None:
    tokenizer = Tokenizer.from_file(str(saved / "tokenizer.json"))
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(saved / "tokenizer.json"))
    encoded = encode_each(Encoder(saved, separator="before", engine=engine), documents)
    wanted = encode_each(Encoder(trained, separator="before", engine=engine), documents)
    assert [ids.tolist() for ids in encoded] == [ids.tolist() for ids in wanted]


@pytest.mark.parametrize("engine", ["auto", "tokenizers"])
def test_ids_with_a_gap_keep_their_width(saved: Path, engine) -> None:
    description = json.loads((saved / "tokenizer.json").read_text(encoding="utf-8"))
    description["model"]["vocab"]["a"] = 70_000
    (saved / "tokenizer.json").write_text(json.dumps(description), encoding="utf-8")
    encoder = Encoder(saved, separator="none", engine=engine)
    assert encoder.vocab_size == 70_001 and encoder.dtype == "uint32"
    assert encoder.encode(["a"])[0].tolist() == [70_000]


def test_gpt2_ids_of_real_text(real_data: Path, tmp_path: Path) -> None:
    saved_at = tmp_path / "tokenizer"
    obtain_tokenizer(DataArguments(tokenizer=str(real_data / "gpt2")), saved_at, list, 0)
    text = (real_data / "tinyshakespeare" / "input.txt").read_text(encoding="utf-8")
    ids, _ = Encoder(saved_at, separator="none").encode([text])
    assert len(ids) == 338_025 and ids.dtype == "uint16"  # as counted by nanoGPT's prepare.py
    reference = AutoTokenizer.from_pretrained(real_data / "gpt2")
    assert ids[:2000].tolist() == reference(text[:20_000])["input_ids"][:2000]
    saved = AutoTokenizer.from_pretrained(saved_at)
    assert saved.eos_token_id == 50_256 and len(saved) == 50_257
    assert json.loads((saved_at / "tokenizer_config.json").read_text(encoding="utf-8"))["model_max_length"] == 1024


def test_ids_are_the_characters_in_their_order(tmp_path: Path, documents: list[str]) -> None:
    args = DataArguments(tokenizer="char", separator="none", sequence_length=32)
    obtain_tokenizer(args, tmp_path / "tokenizer", lambda: documents, 0)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    characters = sorted(set("".join(documents)))
    assert all(tokenizer.decode(tokenizer(document)["input_ids"]) == document for document in documents)
    assert start_ids(tokenizer, "") == [characters.index("\n" if "\n" in characters else characters[0])]
    with pytest.raises(UserError, match="'~'"):
        start_ids(tokenizer, "~", window=32)


def test_shakespeare_is_nanogpt_s(real_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = real_data / "tinyshakespeare" / "input.txt"
    monkeypatch.setattr(small_texts, "URL", path.as_uri())
    form = ("--separator", "none", "--split", "source", "--sequence_length", "64", "--num_proc", "1")
    words = ("--source", "tiny-shakespeare", "--tokenizer", "char", "--dataset_dir", str(tmp_path / "out"))
    prepare_data.main([*words, *form])
    text = path.read_text(encoding="utf-8")
    characters = sorted(set(text))
    wanted = np.array([characters.index(character) for character in text])
    assert len(characters) == 65
    for split, part in (("train", wanted[:1_003_854]), ("validation", wanted[1_003_854:])):
        rows = open_rows(tmp_path / "out" / split).joined()[0].reshape(-1, 65)
        assert [*rows[:, :-1].ravel(), rows[-1, -1]] == part[: len(rows) * 64 + 1].tolist()
    monkeypatch.setattr(small_texts, "SHA256", "0" * 64)  # another text at the same URL
    args = DataArguments(source="tiny-shakespeare", tokenizer="char", dataset_dir=str(tmp_path / "other"))
    with pytest.raises(UserError, match="--data_files"):
        prepare(args)
    assert not (tmp_path / "other.staging").exists()


def test_lost_characters_are_announced(trained: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Encoder(trained, separator="none")
    assert not caplog.records
    description = json.loads((trained / "tokenizer.json").read_text(encoding="utf-8"))
    kept = {token: number for token, number in description["model"]["vocab"].items() if token != "Ċ"}
    model = {"type": "BPE", "vocab": kept, "merges": []}
    text = json.dumps(description | {"model": model, "added_tokens": []})
    (tmp_path / "tokenizer.json").write_text(text, encoding="utf-8")
    Encoder(tmp_path, separator="none", engine="tokenizers")
    assert "1 of 256 bytes" in caplog.text

"""A preparation warns once of text that the tokenizer does not keep, with its share of the documents."""

import re
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from gpt2_repro.data.preparation.prepare import prepare
from tests.reference import write_jsonl


PLAIN = ["one two three", "four five six", "one four", "two  five"] * 10
ODD = {"none": "six one", "unknown": "one \u65e5\u672c two", "upper case": "One TWO", "line breaks": "one\ntwo"}


def saved(tokenizer: Tokenizer, folder: Path, unknown: str | None = None) -> str:
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=unknown).save_pretrained(folder)
    return str(folder)


def byte_level(folder: Path) -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(PLAIN, trainers.BpeTrainer(vocab_size=280, initial_alphabet=alphabet))
    return saved(tokenizer, folder)


def uncased_word_pieces(folder: Path) -> str:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.train_from_iterator(PLAIN, trainers.WordPieceTrainer(vocab_size=60, special_tokens=["[UNK]"]))
    return saved(tokenizer, folder, "[UNK]")


def unigram(folder: Path) -> str:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=60, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False)
    tokenizer.train_from_iterator([*PLAIN, "ONE TWO O"], trainer)
    return saved(tokenizer, folder, "<unk>")


@pytest.mark.parametrize(
    ("build", "lost"),
    [
        (byte_level, {}),
        (uncased_word_pieces, {kind: kind for kind in ("unknown", "upper case", "line breaks")}),
        (unigram, {"unknown": "unknown", "line breaks": "unknown"}),  # it has no token for a line break
    ],
)
def test_lost_text_is_announced_once_with_its_share(
    arguments, tmp_path: Path, caplog, build, lost: dict[str, str]
) -> None:
    tokenizer = build(tmp_path / "tokenizer")
    for kind, text in ODD.items():
        caplog.clear()
        path = write_jsonl(tmp_path / f"{kind.replace(' ', '_')}.jsonl", [*PLAIN, *[text] * 10])
        form = {"data_files": [path], "tokenizer": tokenizer, "separator": "none", "sequence_length": 4}
        prepare(arguments(kind.replace(" ", "_"), **form, validation_tokens=20))
        warnings = [record.getMessage() for record in caplog.records if "changes the text" in record.getMessage()]
        assert len(warnings) == (kind in lost)
        if warnings:  # 10 of 50 documents
            assert re.findall(lost[kind] + r".* in (\d+)%", warnings[0]) == ["20"]
            assert (" of the tokens are unknown" in warnings[0]) == (lost[kind] == "unknown")

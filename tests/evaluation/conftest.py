"""Fixtures for the tests of evaluation: tiny tokenizer, tiny GPT-2, documents."""

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast


WORDS = ["river", "stone", "light", "garden", "winter", "letter", "music", "story", "the", "and", "was", "with", "old"]


def write_rows(path: Path, rows: Iterable[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@pytest.fixture(scope="session")
def prose() -> list[str]:
    """Documents of 30 to 300 words with sentences, commas and line breaks."""
    source = random.Random(0)
    texts = []
    for length in (30, 90, 130, 180, 240, 300):
        words = [source.choice(WORDS) + source.choice(["", "", "", ",", ".", ".\n"]) for _ in range(length)]
        texts.append(" ".join(words).replace("\n ", "\n"))
    # Text that a template or WikiText's detokenizer would change.
    return [*texts, "[ 'river' , " + " ".join(WORDS * 5) + " @-@ ( {{ stone }} ) 's ]\n"]


@pytest.fixture(scope="session")
def tokenizer(prose: list[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with 300 ids, of the same kind as GPT-2's."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet, end = pre_tokenizers.ByteLevel.alphabet(), "<|endoftext|>"
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=[end], initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator(prose, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token=end, eos_token=end)


@pytest.fixture(scope="session")
def gpt2_tokenizer(real_data: Path) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(real_data / "gpt2")


@pytest.fixture(scope="session")
def model(tokenizer: PreTrainedTokenizerFast) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    ids = dict.fromkeys(("bos_token_id", "eos_token_id"), tokenizer.eos_token_id)
    shape = {"vocab_size": len(tokenizer), "n_positions": 128, "n_embd": 32, "n_layer": 2, "n_head": 2}
    network = GPT2LMHeadModel(GPT2Config(**shape, **ids)).eval()
    with torch.no_grad():
        # Weights are large enough that predictions depend on the context and differ from word to word.
        for parameter in network.parameters():
            parameter.mul_(4)
    return network


@pytest.fixture(scope="session")
def network() -> GPT2LMHeadModel:
    """A random GPT-2 with GPT-2's vocabulary, padded to 50,304 ids."""
    torch.manual_seed(0)
    shape = {"vocab_size": 50_304, "n_positions": 256, "n_embd": 16, "n_layer": 2, "n_head": 2}
    made = GPT2LMHeadModel(GPT2Config(**shape, initializer_range=0.3)).eval()
    made.transformer.ln_f.weight.data.mul_(3)  # predictions far from uniform, so that errors are visible
    return made


@pytest.fixture(autouse=True)
def private_dataset_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets_cache")

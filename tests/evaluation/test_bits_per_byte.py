"""Bits per byte of validations and of evaluate.sh agree with ids that are decoded back to bytes."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from gpt2_repro.data.arguments import DataArguments
from gpt2_repro.data.preparation.prepare import prepare
from tests.training.by_hand import nll, rows_of


def unigram_in(folder: Path, texts: list[str]) -> str:
    """Write a tokenizer that begins each text with a space, as those of many models."""
    unigram = Tokenizer(models.Unigram())
    unigram.pre_tokenizer, unigram.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    special = ["<unk>", "</s>"]
    trainer = trainers.UnigramTrainer(vocab_size=250, special_tokens=special, unk_token="<unk>", show_progress=False)
    unigram.train_from_iterator(texts, trainer)
    PreTrainedTokenizerFast(tokenizer_object=unigram, eos_token="</s>", unk_token="<unk>").save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("kind", ["byte_level", "unigram"])
def test_validations_log_bits_per_byte(
    kind: str, tiny_recipe: Path, train: Callable[..., Path], events, tmp_path: Path
) -> None:
    recipe = yaml.safe_load(tiny_recipe.read_text(encoding="utf-8"))
    words: list[object] = []
    if kind == "unigram":
        lines = [line for path in recipe["data"]["data_files"] for line in Path(path).read_text("utf-8").splitlines()]
        documents = [json.loads(line)["text"] for line in lines]
        recipe["data"] |= {"dataset_dir": str(tmp_path / "data"), "tokenizer": unigram_in(tmp_path / "u", documents)}
        prepare(DataArguments(**recipe["data"]))
        words = ["--dataset_dir", tmp_path / "data"]
    run, folder = train(tmp_path / "run", "--max_steps", 4, *words), Path(recipe["data"]["dataset_dir"])
    (last,) = [event for event in events(run) if event["step"] == 4 and "eval_loss" in event]
    tokenizer, rows = AutoTokenizer.from_pretrained(run / "final"), rows_of(folder, "validation")
    text = tokenizer.decode(torch.cat([row[1:] for row in rows]).tolist(), skip_special_tokens=False)
    size = sum(len(part.lstrip(" " if kind == "unigram" else "").encode()) for part in text.split(tokenizer.eos_token))
    assert "\N{REPLACEMENT CHARACTER}" not in text and "<unk>" not in text
    model = AutoModelForCausalLM.from_pretrained(run / "final").eval()
    bits = sum(nll(model, row, len(tokenizer)) for row in rows) / math.log(2) / size
    assert last["eval_bits_per_byte"] == pytest.approx(bits, rel=1e-6)
    assert f"{bits:.4f}" in (run / "final" / "README.md").read_text(encoding="utf-8")

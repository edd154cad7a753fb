"""Models of any author are loaded safely and completely, or rejected."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, GPTNeoConfig, OPTConfig

from gpt2_repro.errors import UserError
from gpt2_repro.files import read_object
from gpt2_repro.model.load import load_model
from gpt2_repro.model.pretraining import plain_model
from tests.model.families import NO_DROPOUT, SHAPE, VOCABULARY, build


IDS = torch.arange(16)[None]


@pytest.fixture
def trained():
    return build("gpt2").eval()


@pytest.fixture
def theirs(trained, tmp_path: Path) -> Path:
    """A checkpoint folder in the standard form of transformers."""
    plain_model(trained.config, trained.state_dict()).save_pretrained(tmp_path / "theirs")
    return tmp_path / "theirs"


def change(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(read_object(path) | changes), encoding="utf-8")


def test_the_config_is_what_stock_transformers_saves(theirs: Path, tmp_path: Path) -> None:
    GPT2LMHeadModel(GPT2Config(**SHAPE | {"vocab_size": VOCABULARY}, **NO_DROPOUT)).save_pretrained(tmp_path / "stock")
    for name in ("config.json", "generation_config.json"):
        assert read_object(theirs / name) == read_object(tmp_path / "stock" / name)


def test_weights_that_do_not_fit_their_config_are_refused(theirs: Path) -> None:
    weights = load_file(theirs / "model.safetensors")
    renamed = {f"_orig_mod.{name}": weight for name, weight in weights.items()}
    save_file(renamed, theirs / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match="keys"):
        load_model(str(theirs))
    change(theirs / "config.json", quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
    with pytest.raises(UserError, match="quantized"):
        load_model(str(theirs))


MASK, BIAS = torch.ones(1, 1, 16, 16, dtype=torch.bool), torch.tensor(-1e4)
NEO = {"num_layers": 2, "num_heads": 2, "hidden_size": 8, "attention_types": [[["global", "local"], 1]]}
OPT = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 8, "ffn_dim": 16, "word_embed_proj_dim": 8}
NEO_CONSTANTS = {"h.0.attn.attention.bias": MASK, "h.0.attn.attention.masked_bias": BIAS}
EARLIER = {
    "gpt2": (GPT2Config(**SHAPE), "transformer", {"h.0.attn.bias": MASK, "h.1.attn.masked_bias": BIAS}),
    "gpt_neo": (GPTNeoConfig(vocab_size=90, **NEO), "transformer", NEO_CONSTANTS),
    "opt": (OPTConfig(vocab_size=90, **OPT), "model", {"decoder.version": torch.ones(1)}),
}


@pytest.mark.parametrize("family", EARLIER)
def test_constants_of_earlier_transformers_are_ignored(family: str, tmp_path: Path) -> None:
    config, prefix, constants = EARLIER[family]
    model = AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights |= {f"{prefix}.{name}": constant for name, constant in constants.items()}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with torch.inference_mode():
        assert torch.equal(load_model(str(tmp_path))(input_ids=IDS).logits, model(input_ids=IDS).logits)
    # Other unexpected weights are refused, also next to the constants.
    name = "h.0.attn.c_attn.gain" if family == "gpt2" else "h.0.attn.q_norm.bias"
    save_file(weights | {name: torch.ones(1)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=f"keys.*{name}"):
        load_model(str(tmp_path))


def test_pickled_weights_and_remote_code_are_refused(theirs: Path, tmp_path: Path) -> None:
    (theirs / "model.safetensors").unlink()
    torch.save({"x": torch.zeros(1)}, theirs / "pytorch_model.bin")
    (theirs / "stranger.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n", encoding="utf-8")
    remote = {"model_type": "stranger", "auto_map": {"AutoConfig": "stranger.Config"}}
    for changes in ({}, remote):
        change(theirs / "config.json", **changes)
        with pytest.raises(UserError, match=str(theirs)):
            load_model(str(theirs))
    assert not (tmp_path / "ran").exists()


def test_an_attention_kernel_of_a_config_is_not_fetched(theirs: Path, monkeypatch) -> None:
    fetched: list[object] = []
    monkeypatch.setattr("transformers.modeling_utils.lazy_import_flash_attention", lambda *a, **_: fetched.append(a))
    expected = load_model(str(theirs))(IDS).logits
    change(theirs / "config.json", attn_implementation="org/kernel")
    assert torch.equal(load_model(str(theirs))(IDS).logits, expected) and not fetched


@pytest.mark.parametrize("place", ["../elsewhere.safetensors", "/elsewhere.safetensors"])
def test_weights_outside_of_the_folder_are_refused(trained, tmp_path: Path, place: str) -> None:
    folder = tmp_path / "sharded"
    plain_model(trained.config, trained.state_dict()).save_pretrained(folder, max_shard_size="10KB")
    load_model(str(folder))
    path = folder / "model.safetensors.index.json"
    weights = read_object(path)["weight_map"]
    first = next(iter(weights))
    (folder / weights[first]).rename(tmp_path / "elsewhere.safetensors")
    change(path, weight_map=weights | {first: place})
    with pytest.raises(UserError, match="outside"):
        load_model(str(folder))

"""Tests of `init_from`."""

from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from gpt2_repro.errors import UserError
from gpt2_repro.model.build import build_model
from gpt2_repro.model.pretraining import sum_biases_by_row
from tests.model.families import configuration


SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def checkpoint_of(folder: Path, *, model_type: str = "gpt2", **changes: object) -> Path:
    """Write a plain checkpoint with 90 ids and a window of 16 tokens."""
    torch.manual_seed(3)
    kinds = {"gpt2": (GPT2Config, GPT2LMHeadModel), "llama": (LlamaConfig, LlamaForCausalLM)}
    config, model = kinds[model_type]
    special = {"bos_token_id": 0, "eos_token_id": 0}
    model(config(vocab_size=90, max_position_embeddings=16, **SHAPE, **special, **changes)).save_pretrained(folder)
    return folder


def start(folder: Path, **changes):
    config = configuration(**{"n_head": 2} | changes)
    return build_model(config, attention="causal_sdpa", init_from=str(folder))


@pytest.mark.parametrize(
    ("theirs", "ours", "message"),
    [
        ({}, {"n_embd": 64, "n_head": 4, "sequence_length": 32}, "--n_head 2 --n_embd 32 --sequence_length 16"),
        ({}, {"vocab_size": 91}, " 90 .* 91"),
        ({"tie_word_embeddings": False}, {}, 'tie_word_embeddings": false'),
        ({"model_type": "llama", "intermediate_size": 48}, {}, "llama.*gpt2.*--init_from.*--model_type"),
    ],
)
def test_init_from_another_model_is_refused(theirs: dict, ours: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        start(checkpoint_of(tmp_path, **theirs), **ours)


@pytest.mark.parametrize("padded", [96, 128, 512])
def test_init_from_weights_with_a_padded_vocabulary(padded: int, tmp_path: Path) -> None:
    torch.manual_seed(3)
    theirs = GPT2LMHeadModel(GPT2Config(vocab_size=padded, n_positions=16, n_layer=2, n_head=2, n_embd=32))
    theirs.save_pretrained(tmp_path)
    ours, table = start(tmp_path).get_input_embeddings().weight, theirs.get_input_embeddings().weight
    assert ours.shape == (128, 32) and torch.equal(ours[:90], table[:90])
    assert not torch.equal(ours[90:96], table[90:96])


def test_a_model_that_will_be_loaded_has_no_usable_weight() -> None:
    """A weight that a resume leaves out would otherwise be a random or an old one, and train unnoticed."""
    model = build_model(configuration("gpt2"), attention="causal_sdpa", init_from=None)
    assert all(weight.isnan().all() for weight in model.parameters())
    ids = torch.arange(12).view(1, 12)
    loaded = build_model(configuration("gpt2"), attention="causal_sdpa", init_from="").state_dict()
    del loaded["transformer.h.1.ln_2.bias"]
    model.load_state_dict(loaded, strict=False)
    assert model(input_ids=ids[:, :-1], shift_labels=ids[:, 1:]).loss.isnan()


@pytest.mark.parametrize("bf16", [False, True])
def test_bias_sums_by_row_change_no_gradient(bf16: bool) -> None:
    ids = torch.arange(3 * 64).view(3, 64)
    results = []
    for change in (lambda model: None, sum_biases_by_row):
        torch.manual_seed(0)
        model = build_model(configuration(n_head=2, sequence_length=64, vocab_size=300), attention="causal_sdpa")
        for weight in model.parameters():  # biases are 0 at first
            weight.data += 0.1 * torch.randn_like(weight)
        change(model)
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = model(input_ids=ids, shift_labels=ids).loss
        loss.backward()
        results.append((loss, {name: weight.grad for name, weight in model.named_parameters()}))
    (expected, theirs), (loss, ours) = results
    assert torch.allclose(loss, expected, rtol=1e-6)
    for name, gradient in theirs.items():
        assert (ours[name] - gradient).norm() <= (2e-3 if bf16 else 1e-5) * gradient.norm(), name

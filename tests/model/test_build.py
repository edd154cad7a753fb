"""Tests of the training configuration, the choice of attention and `init_from`."""

import math
from pathlib import Path

import pytest
import torch
from transformers import AttentionInterface, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, set_seed
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from gpt2_repro.errors import UserError
from gpt2_repro.model import build
from gpt2_repro.model.arguments import ModelArguments
from gpt2_repro.model.build import attention_difference, build_model, choose_attention
from gpt2_repro.model.configuration import build_config


def test_initialisation_is_gpt2s() -> None:
    set_seed(0)
    args = ModelArguments(n_layer=3, n_head=4, n_embd=128)
    model = build_model(build_config(args, sequence_length=64, vocab_size=500), attention="causal_sdpa")
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            expected = 0.02 / math.sqrt(2 * 3) if name.endswith("c_proj.weight") else 0.02
            assert parameter.std().item() == pytest.approx(expected, rel=0.05), name
        else:
            assert (parameter == (1.0 if "ln" in name and name.endswith("weight") else 0.0)).all(), name
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


@pytest.mark.parametrize(
    ("device", "obstacle"),
    [
        ({"cuda": False}, "no GPU"),
        ({"bf16": False}, "bf16"),
        ({"installed": False}, "not installed"),
        ({"capability": (7, 5)}, "Ampere"),
        ({"difference": 0.4}, "0.400"),
        ({"one_row_compiled": True}, "cannot compile"),
        ({}, None),
        # Only the document mask fails. With document lengths transformers does not read the position ids of one row.
        ({"difference_of_documents": 0.4}, None),
        ({"difference_of_documents": 0.4, "document_mask": True}, "0.400"),
        ({"one_row_compiled": True, "document_mask": True}, None),
    ],
)
def test_flash_attention_is_taken_where_it_works(device: dict, obstacle: str | None, monkeypatch) -> None:
    device = {"cuda": True, "bf16": True} | device
    installed, capability = device.pop("installed", True), device.pop("capability", (9, 0))
    differences = [device.pop(key, 0.01) for key in ("difference", "difference_of_documents")]
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: name if installed else None)
    monkeypatch.setattr(build.importlib.metadata, "version", lambda name: "2.8.3")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(build, "attention_difference", lambda *_, document_mask, **__: differences[document_mask])
    chosen, reason = choose_attention("auto", **device)
    assert choose_attention("eager", **device)[0] == "eager"
    if obstacle is None:
        assert chosen == choose_attention("flash_attention_2", **device)[0] == "flash_attention_2"
    else:
        assert chosen == "causal_sdpa" and obstacle in reason
        with pytest.raises(UserError, match=f"{obstacle}.*--attn_implementation auto"):
            choose_attention("flash_attention_2", **device)


def test_wrong_attentions_are_found() -> None:
    """A wrong attention implementation differs clearly from a correct one."""

    def shifted(*args, **kwargs):
        out, weights = sdpa_attention_forward(*args, **kwargs)
        return out.roll(1, dims=1), weights

    def broken_backward(*args, **kwargs):
        out, weights = sdpa_attention_forward(*args, **kwargs)
        out.register_hook(lambda gradient: gradient * torch.nan)
        return out, weights

    def across_documents(module, query, key, value, attention_mask, **kwargs):
        return sdpa_attention_forward(module, query, key, value, None, **kwargs)

    def difference(name: str, *, document_mask: bool = False) -> float:
        return attention_difference(name, "causal_sdpa", device="cpu", document_mask=document_mask)

    # Correct kernels differ by rounding only. flash-attn is not used if the difference is 0.05 or more.
    for function in (shifted, broken_backward, across_documents):
        AttentionInterface.register(function.__name__, function)
    assert difference("shifted") > 0.1 and difference("broken_backward") == math.inf
    assert difference("across_documents") == 0 and difference("across_documents", document_mask=True) > 0.1
    assert difference("eager") < 0.02 and difference("eager", document_mask=True) < 0.02


SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def checkpoint_of(folder: Path, *, model_type: str = "gpt2", **changes: object) -> Path:
    """Write a plain checkpoint with 90 ids and a window of 16 tokens."""
    torch.manual_seed(3)
    kinds = {"gpt2": (GPT2Config, GPT2LMHeadModel), "llama": (LlamaConfig, LlamaForCausalLM)}
    config, model = kinds[model_type]
    special = {"bos_token_id": 0, "eos_token_id": 0}
    model(config(vocab_size=90, max_position_embeddings=16, **SHAPE, **special, **changes)).save_pretrained(folder)
    return folder


def start(folder: Path, *, sequence_length: int = 16, vocab_size: int = 90, **changes: object):
    args = ModelArguments(**{"n_layer": 2, "n_head": 2, "n_embd": 32} | changes)
    config = build_config(args, sequence_length=sequence_length, vocab_size=vocab_size)
    return build_model(config, attention="causal_sdpa", init_from=str(folder))


@pytest.mark.parametrize(
    ("theirs", "ours", "message"),
    [
        ({}, {"n_layer": 3}, "--n_layer 2$"),
        ({}, {"n_embd": 64, "n_head": 4}, "--n_head 2 --n_embd 32$"),
        ({}, {"sequence_length": 32}, "--sequence_length 16$"),
        ({}, {"vocab_size": 91}, " 90 .* 91"),
        ({"activation_function": "relu"}, {}, "activation_function relu .* gelu_new.*--config_overrides"),
        ({"tie_word_embeddings": False}, {}, "tie_word_embeddings False .* True.*--config_overrides"),
        ({"model_type": "llama", "intermediate_size": 48}, {}, "llama.*gpt2.*--init_from.*--model_type"),
    ],
)
def test_init_from_another_model_is_refused(theirs: dict, ours: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        start(checkpoint_of(tmp_path, **theirs), **ours)

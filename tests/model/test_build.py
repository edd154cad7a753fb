"""The configuration that is trained, and the choice of an attention."""

import math

import pytest
import torch
from transformers import (
    AttentionInterface,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    set_seed,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from gpt2_repro.compute import gpt2_parameters
from gpt2_repro.errors import UserError
from gpt2_repro.model import build
from gpt2_repro.model.arguments import ModelArguments, Overrides
from gpt2_repro.model.build import build_model, choose_attention
from gpt2_repro.model.configuration import build_config


def test_the_124m_model_without_allocating_it() -> None:
    config = build_config(ModelArguments(), sequence_length=1024, vocab_size=50_257)
    assert (config.vocab_size, config.true_vocab_size, config.n_positions) == (50_304, 50_257, 1024)
    assert config.resid_pdrop == config.embd_pdrop == config.attn_pdrop == 0.0
    assert config.activation_function == "gelu_pytorch_tanh" and config.use_cache is False
    with torch.device("meta"):
        model = GPT2LMHeadModel(config)
    shape = {"n_layer": 12, "n_embd": 768, "n_positions": 1024}
    assert model.num_parameters() == gpt2_parameters(**shape, vocab_size=50_304) == 124_475_904


def test_gelu_under_its_fast_name_is_gelu_new() -> None:
    from transformers.activations import ACT2FN

    x = torch.linspace(-6, 6, 1001)
    assert torch.allclose(ACT2FN["gelu_pytorch_tanh"](x), ACT2FN["gelu_new"](x), atol=1e-6)


def test_initialisation_is_gpt2s() -> None:
    set_seed(0)
    args = ModelArguments(n_layer=3, n_head=4, n_embd=128)
    model = build_model(build_config(args, sequence_length=64, vocab_size=500), attention="causal_sdpa")
    for name, parameter in model.named_parameters():
        if name.endswith("c_proj.weight"):
            assert parameter.std().item() == pytest.approx(0.02 / math.sqrt(2 * 3), rel=0.05), name
        elif parameter.dim() == 2:
            assert parameter.std().item() == pytest.approx(0.02, rel=0.05), name
        else:
            assert (parameter == (1.0 if "ln" in name and name.endswith("weight") else 0.0)).all(), name
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_matrices_decay_and_vectors_do_not() -> None:
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config())
    decayed = set(Trainer.get_decay_parameter_names(None, model))
    sizes = {name: parameter.dim() for name, parameter in model.named_parameters()}
    assert {name for name, dim in sizes.items() if dim >= 2} == decayed & sizes.keys()
    assert (len(decayed & sizes.keys()), len(sizes) - len(decayed & sizes.keys())) == (50, 98)


def test_heads_must_divide_the_width() -> None:
    with pytest.raises(UserError, match="--n_embd 100 does not divide by --n_head 12"):
        ModelArguments(n_embd=100)


def test_attention_falls_back_with_a_reason_and_is_refused_where_it_was_asked_for(monkeypatch) -> None:
    for cuda, bf16, missing, reason in [
        (False, True, True, "no GPU"),
        (True, True, True, "not installed"),
        (True, False, False, "bf16"),
    ]:
        monkeypatch.setattr(build.importlib.util, "find_spec", lambda name, missing=missing: None if missing else name)
        chosen, why = choose_attention("auto", cuda=cuda, bf16=bf16)
        assert chosen == "causal_sdpa" and reason in why
        with pytest.raises(UserError, match=f"flash_attention_2 cannot be used.*{reason}.*--attn_implementation auto"):
            choose_attention("flash_attention_2", cuda=cuda, bf16=bf16)
    assert choose_attention("eager", cuda=True, bf16=False) == ("eager", "as asked")


def test_flash_attention_is_taken_only_where_it_agrees_with_sdpa(monkeypatch) -> None:
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(build.importlib.metadata, "version", lambda name: "2.8.3")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(build, "_flash_difference", lambda **_: 0.01)
    assert choose_attention("auto", cuda=True, bf16=True)[0] == "flash_attention_2"
    compiled = {"cuda": True, "bf16": True, "one_row_compiled": True}
    assert choose_attention("auto", **compiled)[0] == "causal_sdpa"
    with pytest.raises(UserError, match="one row a pass.*cannot be compiled"):
        choose_attention("flash_attention_2", **compiled)
    monkeypatch.setattr(build, "_flash_difference", lambda **_: 0.4)
    assert choose_attention("auto", cuda=True, bf16=True) == (
        "causal_sdpa",
        "torch's SDPA without a mask, because it differs from SDPA by 0.400",
    )


class _BrokenBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, out: torch.Tensor) -> torch.Tensor:
        return out.clone()

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * torch.nan


def _shifted(*args, **kwargs):
    out, weights = sdpa_attention_forward(*args, **kwargs)
    return out.roll(1, dims=1), weights


def _broken_backward(*args, **kwargs):
    out, weights = sdpa_attention_forward(*args, **kwargs)
    return _BrokenBackward.apply(out), weights


def test_right_attentions_agree_and_wrong_ones_do_not() -> None:
    """Kernels that are right differ by their rounding; the limit of flash-attn is 0.05."""
    for name, function in (("shifted", _shifted), ("broken_backward", _broken_backward)):
        AttentionInterface.register(name, function)
    assert build.attention_difference("eager", "causal_sdpa", device="cpu") < 0.02
    assert build.attention_difference("shifted", "causal_sdpa", device="cpu") > 0.1
    assert build.attention_difference("broken_backward", "causal_sdpa", device="cpu") == float("inf")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory):
    torch.manual_seed(3)
    folder = tmp_path_factory.mktemp("checkpoint")
    config = GPT2Config(vocab_size=90, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


def test_init_from_takes_every_weight(checkpoint) -> None:
    args = ModelArguments(n_layer=2, n_head=2, n_embd=32, pad_vocab_to_multiple_of=64)
    config = build_config(args, sequence_length=16, vocab_size=90)
    model = build_model(config, attention="causal_sdpa", init_from=str(checkpoint))
    plain = GPT2LMHeadModel.from_pretrained(checkpoint)
    for name, weight in plain.named_parameters():
        assert torch.equal(model.get_parameter(name)[: len(weight)], weight), name
    assert model.get_input_embeddings().num_embeddings == 128
    ids = torch.arange(16)[None]
    assert torch.allclose(model(input_ids=ids).logits, plain(ids).logits, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "vocabulary", "message"),
    [
        ({"n_layer": 3}, 90, "another shape than this recipe: type --n_layer 2$"),
        ({"n_embd": 64, "n_head": 4}, 90, "type --n_head 2 --n_embd 32$"),
        ({"sequence_length": 32}, 90, "type --sequence_length 16$"),
        ({}, 91, "knows 90 ids and the prepared data has 91"),
    ],
)
def test_init_from_another_shape_says_what_to_type(change, vocabulary, message, checkpoint) -> None:
    length = change.pop("sequence_length", 16)
    args = ModelArguments(**{"n_layer": 2, "n_head": 2, "n_embd": 32} | change)
    config = build_config(args, sequence_length=length, vocab_size=vocabulary)
    with pytest.raises(UserError, match=message):
        build_model(config, attention="causal_sdpa", init_from=str(checkpoint))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"activation_function": "relu"}, "another function.*activation_function relu, not gelu_new"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx True, not False"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings False, not True"),
        ({"n_inner": 64}, "n_inner 64, not None"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_init_from_another_function_is_refused(other: dict, message: str, tmp_path) -> None:
    shape = {"vocab_size": 90, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
    GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=0, eos_token_id=0, **other)).save_pretrained(tmp_path)
    args = ModelArguments(n_layer=2, n_head=2, n_embd=32)
    with pytest.raises(UserError, match=message):
        build_model(
            build_config(args, sequence_length=16, vocab_size=90), attention="causal_sdpa", init_from=str(tmp_path)
        )


def test_what_is_said_of_another_function_makes_it_the_same(tmp_path) -> None:
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 16}
    own = {"intermediate_size": 48, "num_key_value_heads": 2, "tie_word_embeddings": True}
    own["rope_parameters"] = {"rope_type": "default", "rope_theta": 500000.0}
    LlamaForCausalLM(LlamaConfig(vocab_size=90, **shape, **own)).save_pretrained(tmp_path)

    def start(overrides: str) -> None:
        args = ModelArguments(
            model_type="llama", config_overrides=Overrides(overrides), n_layer=2, n_head=4, n_embd=32
        )
        config = build_config(args, sequence_length=16, vocab_size=90)
        build_model(config, attention="causal_sdpa", init_from=str(tmp_path))

    with pytest.raises(UserError) as refused:
        start("num_key_value_heads=2,tie_word_embeddings=true")
    start(str(refused.value).split("'")[-2])


def test_init_from_another_family_is_refused(tmp_path) -> None:
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=90, **shape)).save_pretrained(tmp_path)
    config = build_config(ModelArguments(n_layer=2, n_head=2, n_embd=32), sequence_length=16, vocab_size=90)
    with pytest.raises(UserError, match="is a llama and this recipe trains a gpt2"):
        build_model(config, attention="causal_sdpa", init_from=str(tmp_path))

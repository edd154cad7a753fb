"""Any causal model of transformers: its configuration, its size, and whether pre-training computes what it does."""

import math

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from gpt2_repro.compute import gpt2_scale
from gpt2_repro.errors import UserError
from gpt2_repro.model.arguments import ModelArguments, Overrides
from gpt2_repro.model.build import build_model
from gpt2_repro.model.configuration import build_config
from gpt2_repro.model.documents import Documents
from gpt2_repro.model.scale import measure, scale_of


LLAMA = "num_key_value_heads=2,intermediate_size=48,tie_word_embeddings=true"
MIXTRAL = "num_local_experts=4,num_key_value_heads=2,intermediate_size=24,router_aux_loss_coef=0.1"


def arguments(model_type: str, overrides: str = "", **further) -> ModelArguments:
    shape = {"n_layer": 2, "n_head": 4, "n_embd": 32} | further
    return ModelArguments(model_type=model_type, config_overrides=Overrides(overrides), **shape)


def built(model_type: str, overrides: str = "", attention: str = "causal_sdpa", **further) -> PreTrainedModel:
    torch.manual_seed(0)
    config = build_config(arguments(model_type, overrides, **further), sequence_length=16, vocab_size=90)
    return build_model(config, attention=attention)


def test_a_recipe_s_words_reach_the_architecture_by_its_own_names() -> None:
    config = build_config(arguments("llama", LLAMA, dropout=0.1), sequence_length=16, vocab_size=90)
    assert type(config) is type(AutoConfig.for_model("llama"))
    shape = (config.num_hidden_layers, config.num_attention_heads, config.hidden_size, config.max_position_embeddings)
    assert shape == (2, 4, 32, 16)
    assert (config.vocab_size, config.true_vocab_size, config.use_cache) == (128, 90, False)
    assert (config.num_key_value_heads, config.intermediate_size, config.tie_word_embeddings) == (2, 48, True)
    assert config.attention_dropout == 0.1
    gpt2 = build_config(arguments("gpt2", "n_inner=64,activation_function=relu"), sequence_length=16, vocab_size=90)
    assert (gpt2.n_inner, gpt2.activation_function, gpt2.n_positions) == (64, "relu", 16)


def test_overrides_are_one_text_however_they_are_written() -> None:
    written = Overrides("b=false, a=1.5,c=silu")
    assert written == Overrides('{"c": "silu", "a": 1.5, "b": false}') == Overrides(written)
    assert Overrides("") == Overrides("{}") == ""
    for nonsense in ("a", "a=1=2", '{"a": }', "[1]"):
        with pytest.raises(ValueError):
            Overrides(nonsense)


@pytest.mark.parametrize(
    ("model_type", "overrides", "line"),
    [
        ("lama", "", "no causal model 'lama': did you mean 'llama'"),
        ("llama", "intermediat_size=2", "a llama has no 'intermediat_size' .* did you mean 'intermediate_size'"),
        ("llama", "vocab_size=5", "cannot set vocab_size, which the tokenizer of the data decides"),
        ("llama", "hidden_size=5", "cannot set hidden_size, which --n_embd decides"),
        ("gpt2", "n_embd=5", "cannot set n_embd, which --n_embd decides"),
        ("gpt2", "n_positions=5", "cannot set n_positions, which --sequence_length decides"),
        ("llama", "intermediate_size=2.5", "refuses this llama: .*intermediate_size.* expected int"),
        ("llama", "num_key_value_heads=3", "4 heads do not share 3 key and value heads"),
        ("llama", "hidden_act=nope", "builds no such llama: 'nope'"),
        ("llama", "intermediate_size=-4", "builds no such llama: .* negative dimension -4"),
        ("llama", "num_key_value_heads=0", "builds no such llama: integer division"),
        ("llama", "pad_token_id=5", "cannot set pad_token_id, which the tokenizer of the data decides"),
        ("llama", "rms_norm_eps=NaN", "a llama computes more"),
        ("gemma3", "", "a gemma3 has its language model beside other parts: type --model_type gemma3_text"),
        ("mllama", "", "an? mllama has its language model beside other parts: name another"),
        ("prophetnet", "", "a prophetnet is half of an encoder"),
        ("mamba", "", "a mamba has no causal_sdpa: type --attn_implementation eager"),
        ("bloom", "", "a bloom has no causal_sdpa: type --attn_implementation eager"),
        ("falcon", "", "a falcon has no causal_sdpa: type --attn_implementation eager"),
        ("bart", "", "a bart is half of an encoder and a decoder"),
        ("cohere", "", "a cohere computes more than hidden states times its head"),
        ("phi", "", "the head of a phi has a bias"),
        ("mixtral", f"{MIXTRAL},sliding_window=4", "attends otherwise .* type --attn_implementation eager"),
    ],
)
def test_what_cannot_be_trained_is_told_in_a_line(model_type: str, overrides: str, line: str) -> None:
    with pytest.raises(UserError, match=line):
        built(model_type, overrides)


def test_a_window_is_trained_with_the_attention_that_has_it() -> None:
    windowed = f"{MIXTRAL},sliding_window=4"
    assert built("mixtral", windowed, attention="eager").config.sliding_window == 4
    config = build_config(arguments("mixtral", windowed), sequence_length=16, vocab_size=90)
    with pytest.raises(UserError, match="type --attn_implementation eager, without --document_mask"):
        build_model(config, attention="eager", documents=Documents(0))


def test_tokens_that_see_later_ones_are_no_causal_model() -> None:
    with pytest.raises(UserError, match="a cpmant .* or sees tokens that come later"):
        built("cpmant", "dim_head=8,dim_ff=24", attention="eager")


def test_a_loss_of_balance_without_routers_is_refused_by_what_mends_it() -> None:
    doge = "num_key_value_heads=4,intermediate_size=24"
    with pytest.raises(UserError, match="set router_aux_loss_coef to 0.0 in --config_overrides"):
        built("doge", doge, attention="eager")
    assert built("doge", f"{doge},router_aux_loss_coef=0.0", attention="eager")


def test_a_model_is_measured_without_the_tokenizer_that_it_comes_with() -> None:
    small = arguments("smollm3", "num_key_value_heads=4,intermediate_size=24")
    assert scale_of(small, sequence_length=16, vocab_size=90).parameters > 0


@pytest.mark.parametrize(
    ("model_type", "overrides", "line"),
    [
        (
            "jamba",
            "intermediate_size=24,num_key_value_heads=2,attn_layer_offset=1,attn_layer_period=2,expert_layer_offset=1",
            "a jamba carries more than attention",
        ),
        ("opt", "ffn_dim=24,word_embed_proj_dim=32", "a opt of this configuration cannot be trained on tokens alone"),
    ],
)
def test_a_mask_of_documents_keeps_them_apart_or_is_refused(model_type: str, overrides: str, line: str) -> None:
    config = build_config(arguments(model_type, overrides), sequence_length=16, vocab_size=90)
    for behind in (False, True):
        with pytest.raises(UserError, match=line):
            build_model(config, attention="causal_sdpa", documents=Documents(0, behind=behind))
    assert built(model_type, overrides)


def test_dropout_needs_a_place() -> None:
    with pytest.raises(UserError, match="mamba has no dropout: leave out --dropout 0.1"):
        build_config(arguments("mamba", dropout=0.1), sequence_length=16, vocab_size=90)


def test_the_comparison_with_the_stock_model_leaves_no_trace() -> None:
    model = built("llama", LLAMA)
    torch.manual_seed(0)
    fresh = AutoModelForCausalLM.from_config(model.config, dtype=torch.float32).state_dict()
    assert all(torch.equal(weight, fresh[name]) for name, weight in model.state_dict().items())
    assert model.training and model.config._attn_implementation == "causal_sdpa"


@pytest.mark.parametrize(
    ("model_type", "overrides"), [("llama", LLAMA), ("mixtral", MIXTRAL), ("qwen3", "head_dim=8")]
)
def test_the_loss_is_the_stock_model_s(model_type: str, overrides: str) -> None:
    model = built(model_type, f"num_key_value_heads=4,{overrides}" if model_type == "qwen3" else overrides)
    ids = torch.randint(90, (3, 17), generator=torch.Generator().manual_seed(1))
    ours = model(input_ids=ids[:, :-1], labels=ids[:, 1:], shift_labels=ids[:, 1:]).loss
    logits = type(model).forward(model, input_ids=ids[:, :-1]).logits[..., :90]
    assert ours.item() == pytest.approx(cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).item(), rel=1e-5)
    assert ours.item() == pytest.approx(math.log(90), abs=0.1)


def test_experts_are_balanced_by_the_gradient_and_not_in_the_loss() -> None:
    model = built("mixtral", MIXTRAL)
    ids = torch.randint(90, (3, 17), generator=torch.Generator().manual_seed(1))
    labels = ids[:, 1:].clone()
    labels[2, 5:] = -100
    ours = model(input_ids=ids[:, :-1], labels=labels, shift_labels=labels, num_items_in_batch=40).loss
    ours.backward()
    gradients = {name: weight.grad.clone() for name, weight in model.named_parameters()}
    model.zero_grad()
    stock = type(model).forward(model, input_ids=ids[:, :-1], output_router_logits=True)
    targets = int((labels != -100).sum())
    nll = cross_entropy(stock.logits[..., :90].flatten(0, 1), labels.flatten(), reduction="sum")
    # The balance of a pass weighs as its targets do in the step.
    ((nll + 0.1 * stock.aux_loss * targets) / 40).backward()
    assert ours.item() == pytest.approx(nll.item() / 40, rel=1e-5)
    for name, weight in model.named_parameters():
        assert torch.allclose(gradients[name], weight.grad, atol=1e-6), name
    router = model.model.layers[0].mlp.gate.weight
    balanced = router.grad.clone()
    model.zero_grad()
    logits = type(model).forward(model, input_ids=ids[:, :-1]).logits[..., :90]
    (cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / 40).backward()
    assert (balanced - router.grad).abs().max() > 10 * 1e-6


def test_gpt2_is_measured_as_it_is_counted() -> None:
    counted = gpt2_scale(n_layer=2, n_embd=32, sequence_length=16, vocab_size=90, pad_to_multiple_of=128)
    assert measure(built("gpt2"), 16) == counted == scale_of(arguments("gpt2"), sequence_length=16, vocab_size=90)


def test_the_parts_of_a_model_are_counted_by_what_they_do() -> None:
    tied = scale_of(arguments("llama", LLAMA), sequence_length=16, vocab_size=90)
    block = (
        32 * 32 * 2 + 2 * 32 * 16 + 3 * 32 * 48 + 2 * 32
    )  # queries and output, two groups of keys and values, SwiGLU, norms
    assert tied.trained == 128 * 32 + 2 * block + 32 and tied.parameters == tied.active == tied.trained - 38 * 32
    assert tied.flops_per_token == 6 * tied.trained + 12 * 2 * 32 * 16
    apart = scale_of(arguments("llama", LLAMA.replace("true", "false")), sequence_length=16, vocab_size=90)
    assert apart.parameters == tied.parameters + 90 * 32 and apart.flops_per_token == tied.flops_per_token
    mixture = scale_of(arguments("mixtral", MIXTRAL), sequence_length=16, vocab_size=90)
    assert mixture.parameters - mixture.active == 2 * 2 * 3 * 32 * 24  # two of four experts idle in two blocks
    assert mixture.flops_per_token == 6 * (mixture.active - 90 * 32 + 38 * 32) + 12 * 2 * 32 * 16

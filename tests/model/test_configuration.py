"""Tests of configurations, model sizes and the load-balancing loss."""

import re
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, MixtralConfig, PreTrainedConfig, PreTrainedModel

from gpt2_repro.errors import UserError
from gpt2_repro.model import architecture, initial_weights
from gpt2_repro.model.architecture import check_architecture
from gpt2_repro.model.arguments import ModelArguments
from gpt2_repro.model.build import build_model
from gpt2_repro.model.configuration import build_config, measure, size_keys, stock_model
from gpt2_repro.model.initial_weights import follow_checkpoint
from gpt2_repro.model.scale import scale_of
from gpt2_repro.model.size import gpt2_scale
from tests.model.families import arguments, configuration


LLAMA = "num_key_value_heads=2,intermediate_size=48,tie_word_embeddings=true"
MIXTRAL = "num_local_experts=4,num_key_value_heads=2,intermediate_size=24,router_aux_loss_coef=0.1"


SIZE = {"sequence_length": 16, "vocab_size": 90}


def built(model_type: str, overrides: str = "") -> PreTrainedModel:
    torch.manual_seed(0)
    return build_model(configuration(model_type, overrides), attention="causal_sdpa")


def test_a_recipe_s_words_reach_the_architecture_by_its_own_names() -> None:
    config = configuration("llama", LLAMA, dropout=0.1)
    wanted = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32, "max_position_embeddings": 16}
    wanted |= {"vocab_size": 128, "true_vocab_size": 90, "use_cache": False, "attention_dropout": 0.1}
    wanted |= {"num_key_value_heads": 2, "intermediate_size": 48, "tie_word_embeddings": True}
    assert type(config) is LlamaConfig and wanted.items() <= config.to_dict().items()
    gpt2 = configuration("gpt2", "n_inner=64,activation_function=relu")
    assert (gpt2.n_inner, gpt2.activation_function, gpt2.n_positions) == (64, "relu", 16)


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
    # The load-balancing loss of a pass is weighted by its share of the step's targets.
    ((nll + 0.1 * stock.aux_loss * targets) / 40).backward()
    assert ours.item() == pytest.approx(nll.item() / 40, rel=1e-5)
    for name, weight in model.named_parameters():
        assert torch.allclose(gradients[name], weight.grad, atol=1e-6), name


def test_gpt2_is_measured_as_it_is_counted() -> None:
    counted = gpt2_scale(n_layer=2, n_embd=32, sequence_length=16, vocab_size=90, pad_to_multiple_of=128)
    assert measure(built("gpt2"), 16) == counted == scale_of(arguments("gpt2"), **SIZE)


def test_the_parts_of_a_model_are_counted_by_what_they_do() -> None:
    tied = scale_of(arguments("llama", LLAMA), **SIZE)
    # Queries and output, two groups of keys and values, SwiGLU, norms.
    block = 32 * 32 * 2 + 2 * 32 * 16 + 3 * 32 * 48 + 2 * 32
    assert tied.trained == 128 * 32 + 2 * block + 32 and tied.parameters == tied.active == tied.trained - 38 * 32
    assert tied.flops_per_token == 6 * tied.trained + 12 * 2 * 32 * 16
    apart = scale_of(arguments("llama", LLAMA.replace("true", "false")), **SIZE)
    assert apart.parameters == tied.parameters + 90 * 32 and apart.flops_per_token == tied.flops_per_token
    mixture = scale_of(arguments("mixtral", MIXTRAL), **SIZE)
    assert mixture.parameters - mixture.active == 2 * 2 * 3 * 32 * 24  # two of four experts idle in two blocks
    assert mixture.flops_per_token == 6 * (mixture.active + 38 * 32) + 12 * 2 * 32 * 16


@pytest.mark.parametrize("model_type", ["llama", "mixtral", "starcoder2", "arcee", "qwen3", "exaone4", "olmo2"])
@pytest.mark.parametrize(("n_layer", "n_head", "n_embd", "length"), [(12, 12, 768, 1024), (2, 4, 128, 16)])
def test_another_architecture_has_the_size_of_gpt2(
    model_type: str, n_layer: int, n_head: int, n_embd: int, length: int
) -> None:
    shape = {"n_layer": n_layer, "n_head": n_head, "n_embd": n_embd}
    size = {"sequence_length": length, "vocab_size": 300}
    args = arguments(model_type, pad_vocab_to_multiple_of=1, **shape)
    with torch.device("meta"):
        gpt2 = GPT2LMHeadModel(GPT2Config(**shape, n_positions=length, vocab_size=300))
        other = stock_model(build_config(args, **size), attention="eager")
    assert other.get_output_embeddings().weight is other.get_input_embeddings().weight
    assert scale_of(args, **size).active == pytest.approx(gpt2.num_parameters(), rel=0.02)
    if model_type != "mixtral":
        assert other.num_parameters() == scale_of(args, **size).active
    # Keys of the user replace the derived keys and do not change the others.
    config = build_config(arguments(model_type, "tie_word_embeddings=false", **shape), **size)
    assert not config.tie_word_embeddings and config.intermediate_size == other.config.intermediate_size


def test_size_keys_of_a_checkpoint_replace_the_derived_ones(tmp_path: Path) -> None:
    theirs = LlamaConfig(num_hidden_layers=3, num_attention_heads=2, hidden_size=16, intermediate_size=72)
    theirs.save_pretrained(tmp_path)
    model = follow_checkpoint(ModelArguments(model_type="llama", init_from=str(tmp_path)), stated=())
    config = build_config(model, sequence_length=8, vocab_size=90)
    assert (config.hidden_size, config.intermediate_size, config.tie_word_embeddings) == (16, 72, False)
    MixtralConfig().save_pretrained(tmp_path)  # with the defaults of transformers
    model = follow_checkpoint(ModelArguments(model_type="mixtral", init_from=str(tmp_path)), stated=())
    stock, recorded = MixtralConfig(), model.config_overrides.values
    assert {"intermediate_size", *size_keys(model, sequence_length=8)} == recorded.keys()
    assert recorded == {key: getattr(stock, key) for key in recorded}


@pytest.mark.parametrize("text", ["{}", "null", '{"model_type": "gpt2", "n_embd": "x"}', "{"])
def test_a_checkpoint_that_cannot_be_read_changes_no_shape(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    section = ModelArguments(init_from=str(tmp_path))
    assert follow_checkpoint(section, stated=()) is section
    missing = ModelArguments(init_from=str(tmp_path / "missing" / "run"))
    assert follow_checkpoint(missing, stated=()) is missing


def test_a_mistake_of_the_program_is_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    LlamaConfig(num_hidden_layers=1).save_pretrained(tmp_path)
    monkeypatch.setattr(initial_weights, "SHAPE", {"n_layer": "no_such_name"})
    with pytest.raises(AttributeError):
        follow_checkpoint(ModelArguments(model_type="llama", init_from=str(tmp_path)), stated=())


SUITABLE = ["gpt2", "gpt_neox", "starcoder2", "arcee", "llama", "qwen3", "exaone4", "olmo2", "mixtral", "olmoe"]


@pytest.mark.parametrize("model_type", [*SUITABLE, "gemma3_text", "olmo3"])
def test_an_architecture_with_the_same_loss_and_separate_documents_is_accepted(model_type: str) -> None:
    check_architecture(configuration(model_type), document_mask=True)


@pytest.mark.parametrize(
    ("model_type", "length", "window"), [("qwen3", 16, 4), ("qwen3", 1024, 600), ("gemma3_text", 2048, 1900)]
)
def test_a_window_is_found(model_type: str, length: int, window: int) -> None:
    config = configuration(model_type, sequence_length=length)
    config.layer_types, config.sliding_window = ["full_attention", "sliding_attention"], window
    with pytest.raises(UserError, match="attention"):
        check_architecture(config)


@pytest.mark.parametrize(
    ("model_type", "overrides"),
    [
        *((name, "") for name in ("jamba", "olmo_hybrid", "minimax", "lfm3", "opt")),
        ("lfm2", '{"full_attn_idxs": [0]}'),
    ],
)
def test_a_document_mask_that_layers_ignore_is_refused(model_type: str, overrides: str) -> None:
    config = configuration(model_type, overrides, n_embd=64)
    check_architecture(config)
    with pytest.raises(UserError, match=f"--model_type {model_type}"):
        check_architecture(config, document_mask=True)


@pytest.mark.parametrize("model_type", ["qwen2", "smollm3", "mistral", "phi3"])
def test_a_window_is_not_ignored(model_type: str) -> None:
    with pytest.raises(UserError, match="sliding_window"):
        configuration(model_type, "sliding_window=8")


def test_an_override_chooses_the_layers_that_others_are_derived_from() -> None:
    config = configuration("exaone4", "sliding_window_pattern=2")
    assert config.layer_types == ["sliding_attention", "full_attention"] and config.sliding_window >= 16
    config = configuration("exaone4")
    assert config.layer_types == ["full_attention", "full_attention"]
    config = configuration("afmoe", "global_attn_every_n_layers=2,moe_intermediate_size=8")
    assert config.layer_types == ["sliding_attention", "full_attention"]
    assert configuration("minimax").layer_types == ["full_attention", "linear_attention"]


NOT_BALANCED = "moe_intermediate_size=16,intermediate_size=32,n_routed_experts=4,num_experts_per_tok=2"
OTHER_LOSS, NOT_BUILT = ("nanochat", "phi", "bert"), ("fuyu", "falcon", "lfm2_moe", "roberta", "gemma3", "musicgen")


@pytest.mark.parametrize(
    ("model_type", "overrides", "problem"),
    [
        *((name, "", "cannot be trained here") for name in OTHER_LOSS),
        *((name, "", "") for name in NOT_BUILT),
        ("glm4_moe", f"{NOT_BALANCED},first_k_dense_replace=1", "no load-balancing loss"),
    ],
)
def test_an_architecture_that_would_be_another_model_is_refused(model_type: str, overrides: str, problem: str) -> None:
    with pytest.raises(UserError, match=f"--model_type {model_type}.*{problem}"):
        check_architecture(configuration(model_type, overrides))


def test_an_architecture_larger_than_gpt2_is_refused() -> None:
    with pytest.raises(UserError, match="cannot have the FLOPs of a GPT-2"):
        configuration("qwen2_moe")


def test_an_idle_weight_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def with_idle(config: PreTrainedConfig, **options: object) -> PreTrainedModel:
        model = stock_model(config, **options)
        model.base_model.idle = torch.nn.Linear(2, 2)
        return model

    monkeypatch.setattr(architecture, "stock_model", with_idle)
    with pytest.raises(UserError, match=r"idle\.weight gets no gradient"):
        check_architecture(configuration("llama"))


@pytest.mark.parametrize("model_type", ["gpt2", "llama", "mixtral", "gpt_neox", "opt"])
def test_residual_projections_start_smaller_as_in_gpt2(model_type: str) -> None:
    model = build_model(configuration(model_type, n_embd=128), attention="causal_sdpa")
    spread = {name: weight.std().item() for name, weight in model.named_parameters() if weight.ndim > 1}
    projections = r"c_proj|o_proj|out_proj|down_proj|fc2|attention\.dense|dense_4h_to_h"
    residual = {name for name in spread if re.search(projections, name)}
    assert len(residual) == 4
    for name, value in spread.items():
        assert value == pytest.approx(0.02 / 2 if name in residual else 0.02, rel=0.1), name

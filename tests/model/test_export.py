"""What is loaded is plain, whole and harmless, whoever saved it."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from gpt2_repro.data.tokenizer import count_characters
from gpt2_repro.errors import UserError
from gpt2_repro.model.arguments import ModelArguments
from gpt2_repro.model.build import build_model
from gpt2_repro.model.configuration import build_config
from gpt2_repro.model.export import load_model, load_tokenizer, resolve_checkpoint, start_ids, untrained_like
from gpt2_repro.model.pretraining import plain_model


@pytest.fixture
def trained():
    args = ModelArguments(n_layer=2, n_head=2, n_embd=32, pad_vocab_to_multiple_of=64)
    return build_model(build_config(args, sequence_length=16, vocab_size=100), attention="causal_sdpa").eval()


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.arange(16)[None]


def test_the_config_is_what_stock_transformers_saves(trained, tmp_path: Path) -> None:
    plain_model(trained.config, trained.state_dict()).save_pretrained(tmp_path / "ours")
    shape = {"n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 100}
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    GPT2LMHeadModel(GPT2Config(**shape, **no_dropout)).save_pretrained(tmp_path / "stock")
    for name in ("config.json", "generation_config.json"):
        ours, stock = (json.loads((tmp_path / folder / name).read_text()) for folder in ("ours", "stock"))
        assert ours == stock


def test_a_training_checkpoint_and_its_plain_form_are_one_model(trained, ids, tmp_path: Path) -> None:
    trained.save_pretrained(tmp_path / "checkpoint-1")
    plain_model(trained.config, trained.state_dict()).save_pretrained(tmp_path / "final")
    expected = trained(input_ids=ids).logits
    for folder in ("checkpoint-1", "final"):
        model = load_model(str(tmp_path / folder))
        assert model.config.vocab_size == 100 and model.dtype == torch.float32 and not model.training
        assert torch.allclose(model(ids).logits, expected, atol=1e-5)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "final")
    assert torch.allclose(stock(ids).logits, expected, atol=1e-5)


def test_a_run_means_its_final(trained, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "recipe.yaml").write_text("model: {}\n")
    with pytest.raises(UserError, match="no final/ yet"):
        resolve_checkpoint(str(run))
    trained.save_pretrained(run / "final")
    assert resolve_checkpoint(str(run)) == resolve_checkpoint(str(run / "final")) == str(run / "final")


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is no checkpoint: name a final/"):
        resolve_checkpoint(str(tmp_path))
    for missing in ("runs/nothing", "./nothing", str(tmp_path / "nothing")):
        with pytest.raises(UserError, match="there is no checkpoint"):
            resolve_checkpoint(missing)
    assert resolve_checkpoint("openai-community/gpt2") == "openai-community/gpt2"
    with pytest.raises(UserError, match="has no tokenizer"):
        load_tokenizer(str(tmp_path))


def test_weights_that_do_not_fit_their_config_are_refused(trained, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    plain_model(trained.config, trained.state_dict()).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    renamed = {f"_orig_mod.{name}": weight for name, weight in weights.items()}
    save_file(renamed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match="cannot load .* keys"):
        load_model(str(tmp_path))


def test_pickled_weights_and_remote_code_are_refused(trained, tmp_path: Path) -> None:
    plain_model(trained.config, trained.state_dict()).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save({"x": torch.zeros(1)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match="cannot load"):
        load_model(str(tmp_path))
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"model_type": "stranger", "auto_map": {"AutoConfig": "stranger.Config"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "stranger.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(UserError, match="cannot load"):
        load_model(str(tmp_path))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"n_layer": 200_000}, "200,000 layers"),
        ({"n_embd": 32_000_000}, "asks for"),
        ({"n_positions": 10**12}, "asks for"),
        ({"n_head": 0}, ""),
        ({"n_head": 3}, ""),
        ({"n_embd": "wide"}, ""),
        ({"dtype": "no_such_dtype"}, ""),
        ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}, "quantized"),
        ({"quantization_config": {"quant_method": "stranger"}}, ""),
    ],
)
def test_a_strangers_configuration_is_one_line(trained, tmp_path: Path, changes: dict, said: str) -> None:
    plain_model(trained.config, trained.state_dict()).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(UserError, match=str(tmp_path)) as raised:
        load_model(str(tmp_path))
    assert said in str(raised.value)


def test_a_strangers_attention_kernel_is_not_fetched(trained, ids, tmp_path: Path, monkeypatch) -> None:
    fetched: list[object] = []
    monkeypatch.setattr("transformers.modeling_utils.lazy_import_flash_attention", lambda *a, **_: fetched.append(a))
    plain_model(trained.config, trained.state_dict()).save_pretrained(tmp_path)
    expected = load_model(str(tmp_path))(ids).logits
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"attn_implementation": "org/kernel"}))
    assert torch.equal(load_model(str(tmp_path))(ids).logits, expected) and not fetched


@pytest.mark.parametrize("place", ["../elsewhere.safetensors", "/elsewhere.safetensors"])
def test_weights_outside_of_the_folder_are_refused(trained, tmp_path: Path, place: str) -> None:
    folder = tmp_path / "theirs"
    plain_model(trained.config, trained.state_dict()).save_pretrained(folder, max_shard_size="10KB")
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    first = next(iter(index["weight_map"]))
    load_model(str(folder))
    (folder / index["weight_map"][first]).rename(tmp_path / "elsewhere.safetensors")
    index["weight_map"][first] = place
    path.write_text(json.dumps(index))
    with pytest.raises(UserError, match="outside"):
        load_model(str(folder))


def test_a_damaged_tokenizer_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"model": 1}')
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(UserError, match="has no tokenizer"):
        load_tokenizer(str(tmp_path))


def test_the_untrained_twin_has_fresh_weights_of_its_own_seed(trained) -> None:
    plain = plain_model(trained.config, trained.state_dict())
    before = torch.random.get_rng_state()
    first, again, other = (untrained_like(plain, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert first.config.to_dict() == plain.config.to_dict()
    weight = "transformer.h.0.attn.c_attn.weight"
    assert torch.equal(first.state_dict()[weight], again.state_dict()[weight])
    assert not torch.equal(first.state_dict()[weight], other.state_dict()[weight])
    assert not torch.equal(first.state_dict()[weight], plain.state_dict()[weight])


def test_a_tokenizer_of_characters_needs_a_prompt_that_it_knows(tmp_path: Path) -> None:
    count_characters(["abc"], tmp_path, sequence_length=8)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert start_ids(tokenizer, "cab", window=8) == [2, 0, 1]
    with pytest.raises(UserError, match="--sample_prompt TEXT in training"):
        start_ids(tokenizer, "", window=8)
    with pytest.raises(UserError, match="the prompt 'cat' cannot be encoded"):
        start_ids(tokenizer, "cat", window=8)

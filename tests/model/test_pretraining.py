"""The pre-training forward against the stock model, for the three architectures."""

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MixtralConfig, PreTrainedModel
from transformers.integrations import sdpa_attention

from gpt2_repro.compute import IGNORED
from gpt2_repro.model import pretraining
from gpt2_repro.model.pretraining import chunked_cross_entropy, make_pretraining, plain_model


VOCABULARY, PADDED = 90, 96
CONFIGS = {
    "gpt2": GPT2Config(
        vocab_size=PADDED,
        n_positions=16,
        n_embd=32,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    ),
    "llama": LlamaConfig(
        vocab_size=PADDED,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
    ),
    "mixtral": MixtralConfig(
        vocab_size=PADDED,
        hidden_size=32,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        router_aux_loss_coef=0.0,  # the stock loss that is compared has no balance either
        max_position_embeddings=16,
    ),
}


def build(family: str, attention: str = "causal_sdpa") -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[family], dtype=torch.float32, attn_implementation=attention)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)  # far from uniform, so that mistakes show
    return make_pretraining(model, vocab_size=VOCABULARY)


@pytest.fixture
def batch() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, VOCABULARY, (3, 17), generator=torch.Generator().manual_seed(1))
    labels = ids[:, 1:].clone()
    labels[1, 5:] = IGNORED
    return ids[:, :-1], labels


@pytest.mark.parametrize("family", CONFIGS)
def test_loss_and_gradients_are_the_stock_models(family: str, batch) -> None:
    ids, labels = batch
    model, plain = build(family), build(family, attention="eager")
    loss = model(input_ids=ids, labels=labels, shift_labels=labels).loss
    loss.backward()
    logits = type(plain).forward(plain, input_ids=ids).logits[..., :VOCABULARY]
    reference = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
    reference.backward()
    assert loss.item() == pytest.approx(reference.item(), rel=1e-6)
    for (name, ours), (_, theirs) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert torch.allclose(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6), name


@pytest.mark.parametrize("chunk", [1, 5, 48, 1000])
def test_chunks_do_not_show(chunk: int) -> None:
    hidden = torch.randn(48, 8, dtype=torch.float64).float().requires_grad_()
    weight = torch.randn(PADDED, 8).requires_grad_()
    labels = torch.randint(0, VOCABULARY, (48,))
    labels[3:7] = IGNORED
    total = chunked_cross_entropy(hidden, weight, labels, vocab_size=VOCABULARY, chunk=chunk)
    (total / 7).backward()
    grads, hidden.grad, weight.grad = (hidden.grad, weight.grad), None, None
    plain = F.cross_entropy(hidden @ weight[:VOCABULARY].T, labels, ignore_index=IGNORED, reduction="sum")
    (plain / 7).backward()
    assert total.item() == pytest.approx(plain.item(), rel=1e-6) and total.dtype == torch.float32
    assert torch.allclose(grads[0], hidden.grad, atol=1e-5) and torch.allclose(grads[1], weight.grad, atol=1e-5)
    assert grads[1][VOCABULARY:].abs().max() == 0  # padding ids learn nothing from the softmax


def test_bf16_products_with_fp32_sums() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(512, 64, generator=generator), torch.randn(PADDED, 64, generator=generator) * 0.2
    labels = torch.randint(0, VOCABULARY, (512,), generator=generator)
    rounded = [tensor.bfloat16() for tensor in (hidden, weight)]
    exact = chunked_cross_entropy(*(tensor.float() for tensor in rounded), labels, vocab_size=VOCABULARY) / 512
    ours = chunked_cross_entropy(*rounded, labels, vocab_size=VOCABULARY) / 512
    assert ours.dtype == torch.float32
    # A loss rounded to bf16 would be off by up to 0.008 at this size.
    assert ours.item() == pytest.approx(exact.item(), abs=2e-3)
    with torch.autocast("cpu", torch.bfloat16):
        autocast = chunked_cross_entropy(hidden, weight, labels, vocab_size=VOCABULARY) / 512
    assert autocast.item() == pytest.approx(ours.item(), rel=1e-6)


def test_without_gradients_none_is_computed(batch, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    stock = pretraining._minus_one_at
    monkeypatch.setattr(pretraining, "_minus_one_at", lambda *args: calls.append(args) or stock(*args))
    model = build("gpt2")
    with torch.no_grad():
        model(input_ids=batch[0], shift_labels=batch[1])
    assert calls == []
    model(input_ids=batch[0], shift_labels=batch[1])
    assert len(calls) == 1


@pytest.mark.parametrize("family", CONFIGS)
def test_attention_gets_no_mask(family: str, batch, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    stock = F.scaled_dot_product_attention

    def watched(query, key, value, attn_mask=None, is_causal=False, **named):
        calls.append((attn_mask, is_causal))
        return stock(query, key, value, attn_mask=attn_mask, is_causal=is_causal, **named)

    monkeypatch.setattr(sdpa_attention.torch.nn.functional, "scaled_dot_product_attention", watched)
    build(family)(input_ids=batch[0], shift_labels=batch[1])
    assert calls == [(None, True)] * 2


def test_sampling_sees_the_true_vocabulary_and_writes_what_the_plain_model_writes(batch) -> None:
    ids = batch[0]
    model = build("gpt2").eval()
    assert model(input_ids=ids).logits.shape[-1] == VOCABULARY
    plain = plain_model(model.config, model.state_dict())
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    mask = torch.ones_like(ids[:1, :4])
    written = model.generate(ids[:1, :4], attention_mask=mask, **options)
    assert written.tolist() == plain.generate(ids[:1, :4], attention_mask=mask, **options).tolist()


def test_unshifted_labels_are_refused(batch) -> None:
    with pytest.raises(ValueError, match="shift_labels"):
        build("gpt2")(input_ids=batch[0], labels=batch[1])


@pytest.mark.parametrize("family", CONFIGS)
def test_the_plain_model_computes_the_same(family: str, batch) -> None:
    model = build(family).eval()
    plain = plain_model(model.config, {name: weight.bfloat16() for name, weight in model.state_dict().items()})
    assert plain.config.vocab_size == plain.get_input_embeddings().num_embeddings == VOCABULARY
    assert not hasattr(plain.config, "true_vocab_size") and plain.dtype == torch.float32
    exact = plain_model(model.config, model.state_dict())
    assert torch.allclose(exact(batch[0]).logits, model(input_ids=batch[0]).logits, atol=1e-5)


def test_weights_that_do_not_fit_are_refused() -> None:
    model = build("gpt2")
    weights = model.state_dict()
    with pytest.raises(KeyError, match="ln_f"):
        plain_model(model.config, {name: value for name, value in weights.items() if "ln_f" not in name})
    with pytest.raises(ValueError, match="module.x"):
        plain_model(model.config, weights | {"module.x": torch.zeros(1)})

"""Attention inside documents against models that are run on each document alone, at its place in the row."""

import itertools
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    modeling_flash_attention_utils,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from gpt2_repro.errors import UserError
from gpt2_repro.model import build as building
from gpt2_repro.model.build import attention_difference, choose_attention
from gpt2_repro.model.compilation import Graph, compile_loss
from gpt2_repro.model.documents import Documents, documents_of
from gpt2_repro.model.pretraining import make_pretraining


S = 7  # the separator
VOCABULARY, LENGTH = 90, 16
CONFIGS: dict[str, PreTrainedConfig] = {
    "gpt2": GPT2Config(
        vocab_size=96,
        n_positions=LENGTH,
        n_embd=32,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=S,
        eos_token_id=S,
    ),
    "llama": LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
    ),
    "mixtral": MixtralConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        router_aux_loss_coef=0.0,  # the stock loss that is compared has no balance either
        experts_implementation="eager",  # grouped products have no float64
        max_position_embeddings=LENGTH,
    ),
}
# Where documents begin in the rows of a batch, by the place of the separator. The first row opens with one, the
# second with the middle of one, the third is in one document, the fourth has the shortest there are.
STARTS = [[0, 5, 11], [0, 3], [0], [0, 1, 2, 15]]


def build(family: str, attention: str = "causal_sdpa", documents: Documents | None = None) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[family], dtype=torch.float64, attn_implementation="causal_sdpa")
    model.config._attn_implementation = attention  # flash-attn is not there to be asked
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)  # far from uniform, so that mistakes show
    return make_pretraining(model, vocab_size=VOCABULARY, documents=documents)


def batch_of(starts: list[list[int]], *, behind: bool) -> dict[str, torch.Tensor]:
    """Rows of random ids with the separators that make documents begin there."""
    ids = torch.randint(S + 1, VOCABULARY, (len(starts), LENGTH + 1), generator=torch.Generator().manual_seed(1))
    for row, places in zip(ids, starts, strict=True):
        if places != [0, 3] and not behind:
            row[0] = S
        row[[place - behind for place in places[1:]]] = S
    return {"input_ids": ids[:, :-1].clone(), "shift_labels": ids[:, 1:].clone()}


def alone(family: str, batch: dict[str, torch.Tensor], starts: list[list[int]]) -> tuple[torch.Tensor, list]:
    """The summed loss and its gradients, each document run by itself at its positions, by stock attention."""
    model = build(family, "eager")
    total = torch.zeros((), dtype=torch.float64)
    for ids, labels, places in zip(*batch.values(), starts, strict=True):
        for begin, end in zip(places, [*places[1:], LENGTH], strict=True):
            positions = torch.arange(begin, end)[None]
            logits = type(model).forward(model, input_ids=ids[None, begin:end], position_ids=positions).logits
            total = total + F.cross_entropy(logits[0, :, :VOCABULARY], labels[begin:end], reduction="sum")
    total.backward()
    return total, [parameter.grad for parameter in model.parameters()]


@pytest.fixture(autouse=True)
def fresh_dynamo():
    yield
    torch._dynamo.reset()


def each_document(cumulative: torch.Tensor, *of_all: torch.Tensor) -> Iterator[tuple[slice, list[torch.Tensor]]]:
    """Each document's place in [tokens, heads, width], and what it has of each: [heads, tokens, width]."""
    for begin, end in itertools.pairwise(cumulative.tolist()):
        yield slice(begin, end), [x[begin:end].transpose(0, 1) for x in of_all]


def weights_of(q: torch.Tensor, k: torch.Tensor, scale: float) -> torch.Tensor:
    scores = q @ k.transpose(1, 2) * scale
    return scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf).softmax(-1)


@torch.library.custom_op("flash_attn_stand_in::_flash_attn_varlen_forward", mutates_args=())
def varlen_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cumulative: torch.Tensor, scale: float, causal: bool
) -> torch.Tensor:
    assert causal and cumulative.dtype == torch.int32 and cumulative[0] == 0 and cumulative[-1] == len(q)
    out = torch.empty_like(q)
    for place, (one, keys, values) in each_document(cumulative, q, k, v):
        out[place] = (weights_of(one, keys, scale) @ values).transpose(0, 1)
    return out


@torch.library.custom_op("flash_attn_stand_in::_flash_attn_varlen_backward", mutates_args=())
def varlen_backward(
    out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cumulative: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    gradients = (torch.empty_like(q), torch.empty_like(k), torch.empty_like(v))
    for place, (one, keys, values, of_out) in each_document(cumulative, q, k, v, out):
        weights = weights_of(one, keys, scale)
        of_weights = of_out @ values.transpose(1, 2)
        of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True)) * scale
        found = (of_scores @ keys, of_scores.transpose(1, 2) @ one, weights.transpose(1, 2) @ of_out)
        for gradient, part in zip(gradients, found, strict=True):
            gradient[place] = part.transpose(0, 1)
    return gradients


varlen_forward.register_fake(lambda q, *args, **kwargs: torch.empty_like(q))
varlen_backward.register_fake(lambda out, q, k, v, *args: tuple(map(torch.empty_like, (q, k, v))))
varlen_forward.register_autograd(
    lambda ctx, out: (*varlen_backward(out, *ctx.saved_tensors, ctx.scale), None, None, None),
    setup_context=lambda ctx, inputs, output: (ctx.save_for_backward(*inputs[:4]), setattr(ctx, "scale", inputs[4])),
)


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False
):
    assert cu_seqlens_q is cu_seqlens_k and max_seqlen_q == max_seqlen_k == LENGTH and not dropout_p
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    return varlen_forward(q, k, v, cu_seqlens_q, softmax_scale, causal=causal)


def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True).transpose(1, 2)


@pytest.fixture(autouse=True)
def flash_attn(monkeypatch: pytest.MonkeyPatch) -> None:
    """flash-attn by its interface, where transformers looks it up: the kernels need a GPU."""
    stand_ins = (flash_attn_func, flash_attn_varlen_func, None, None, None)
    monkeypatch.setattr(modeling_flash_attention_utils, "_lazy_imports", lambda *args, **kwargs: stand_ins)
    monkeypatch.setattr(modeling_flash_attention_utils, "_loaded_implementation", None)
    modeling_flash_attention_utils.lazy_import_flash_attention("flash_attention_2")


ATTENTIONS = ["causal_sdpa", "eager", "flash_attention_2"]


@pytest.mark.parametrize("behind", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("family", CONFIGS)
def test_loss_and_gradients_are_those_of_documents_run_alone(family: str, attention: str, behind: bool) -> None:
    batch = batch_of(STARTS, behind=behind)
    documents = Documents(S, behind=behind)
    found = [row.nonzero().flatten().tolist() for row in documents.starts(batch["input_ids"])]
    assert found == STARTS
    reference, gradients = alone(family, batch, STARTS)
    model = build(family, attention, documents)
    loss = model(**batch, num_items_in_batch=1).loss
    loss.backward()
    assert loss.item() == pytest.approx(reference.item(), rel=1e-6)
    for (name, ours), theirs in zip(model.named_parameters(), gradients, strict=True):
        # llama's norms and positions are fp32 in every dtype
        assert (ours.grad - theirs).abs().max() < 1e-5 * theirs.abs().max(), name


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_what_is_not_the_loss_of_packed_rows_runs_across_separators(attention: str) -> None:
    """Samples, HellaSwag and whoever loads the model know of no documents."""
    batch = batch_of(STARTS, behind=False)
    masked, plain = build("gpt2", attention, Documents(S)), build("gpt2", attention)
    assert torch.equal(masked(**batch, reduction="none").loss, plain(**batch, reduction="none").loss)
    assert torch.equal(masked(input_ids=batch["input_ids"]).logits, plain(input_ids=batch["input_ids"]).logits)
    assert masked.config.to_dict() == plain.config.to_dict()


@pytest.mark.parametrize(("attention", "checkpointing"), [("causal_sdpa", False), ("flash_attention_2", True)])
def test_one_graph_for_any_number_of_documents(attention: str, checkpointing: bool) -> None:
    eager, model = (build("gpt2", attention, Documents(S)).train() for _ in range(2))
    if checkpointing:
        model.activation_checkpointing_enable()
    graphs = compile_loss(model, backend="aot_eager")
    for starts in (STARTS, [[0], [0], [0], [0]], [list(range(LENGTH))] * 4, [[0, 9]] * 4):
        batch = batch_of(starts, behind=False)
        for each in (eager, model):
            each.zero_grad()
            each(**batch).loss.backward()
        for (name, ours), theirs in zip(model.named_parameters(), eager.parameters(), strict=True):
            assert torch.allclose(ours.grad, theirs.grad, rtol=1e-5, atol=1e-7), name
    flash = attention == "flash_attention_2"
    assert graphs == [Graph(training=True, causal=2 * flash, masked=2 * (not flash), logits=False)]


def test_the_separator_is_the_tokenizers_end_of_text() -> None:
    named = SimpleNamespace(eos_token_id=S)
    assert (documents_of(named, "before"), documents_of(named, "after")) == (Documents(S), Documents(S, behind=True))
    with pytest.raises(UserError, match="names none: leave it out"):
        documents_of(SimpleNamespace(eos_token_id=None), "before")


def test_the_mask_has_the_dtype_that_attention_computes_in() -> None:
    model, ids = build("gpt2"), batch_of(STARTS, behind=False)["input_ids"]
    assert Documents(S).attention(model, ids)["attention_mask"].dtype == torch.float64
    with torch.autocast("cpu", torch.bfloat16):
        assert Documents(S).attention(model, ids)["attention_mask"].dtype == torch.bfloat16


def test_flash_attn_has_to_agree_on_documents_too(monkeypatch: pytest.MonkeyPatch) -> None:
    differences = {False: 0.01, True: 0.4}
    monkeypatch.setattr(building.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(building.importlib.metadata, "version", lambda name: "2.8.3")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(building, "_flash_difference", lambda *, document_mask: differences[document_mask])
    on_gpu = {"cuda": True, "bf16": True}
    assert choose_attention("auto", **on_gpu)[0] == "flash_attention_2"
    assert choose_attention("auto", **on_gpu, document_mask=True) == (
        "causal_sdpa",
        "torch's SDPA with a mask of documents, because it differs from SDPA by 0.400",
    )
    with pytest.raises(UserError, match="flash_attention_2 cannot be used: it differs .* --attn_implementation auto"):
        choose_attention("flash_attention_2", **on_gpu, document_mask=True)
    differences[True] = 0.01
    # Told the lengths, transformers does not read the position ids of one row.
    for asked in ("auto", "flash_attention_2"):
        chosen = choose_attention(asked, **on_gpu, one_row_compiled=True, document_mask=True)
        assert chosen[0] == "flash_attention_2"


def test_an_attention_across_documents_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def across(module, query, key, value, attention_mask, **kwargs):
        return sdpa_attention_forward(module, query, key, value, None, **kwargs)

    AttentionInterface.register("across", across)
    assert attention_difference("across", "causal_sdpa", device="cpu") == 0
    assert attention_difference("across", "causal_sdpa", device="cpu", document_mask=True) > 0.1
    assert attention_difference("eager", "causal_sdpa", device="cpu", document_mask=True) < 0.02

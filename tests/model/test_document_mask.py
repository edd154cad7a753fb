"""With a document mask, losses equal those of documents processed one at a time."""

import functools

import pytest
import torch
import torch.nn.functional as F
from transformers import AttentionInterface, modeling_flash_attention_utils

from gpt2_repro.model.attention import Machine, time_kernels
from gpt2_repro.model.build import compile_loss
from gpt2_repro.model.document_mask import Documents
from tests.model import families
from tests.model.families import CONFIGS, LENGTH, VOCABULARY
from tests.model.families import SEPARATOR as S


build = functools.partial(families.build, dtype=torch.float64)
# Positions at which documents start, in the rows of a batch. The first row starts with a document, the second in the
# middle of a document. The third is a single document. The fourth has documents of one id.
STARTS = [[0, 5, 11], [0, 3], [0], [0, 1, 2, 15]]
ATTENTIONS = ["causal_sdpa", "eager", "flash_attention_2"]


def batch_of(starts: list[list[int]], *, behind: bool = False) -> dict[str, torch.Tensor]:
    """Return rows of random ids with separators, so that documents start at `starts`.

    If `behind` is true, a separator is the last token of a document, otherwise the first token.
    """
    ids = torch.randint(S + 1, VOCABULARY, (len(starts), LENGTH + 1), generator=torch.Generator().manual_seed(1))
    for row, places in zip(ids, starts, strict=True):
        if places != [0, 3] and not behind:
            row[0] = S
        row[[place - behind for place in places[1:]]] = S
    return {"input_ids": ids[:, :-1].clone(), "shift_labels": ids[:, 1:].clone()}


def alone(family: str, batch: dict[str, torch.Tensor], starts: list[list[int]]) -> tuple[torch.Tensor, list]:
    """Return the summed loss and its gradients, with each document processed alone."""
    model = build(family, "eager")
    total = torch.zeros((), dtype=torch.float64)
    for ids, labels, places in zip(*batch.values(), starts, strict=True):
        for begin, end in zip(places, [*places[1:], LENGTH], strict=True):
            positions = torch.arange(begin, end)[None]
            logits = type(model).forward(model, input_ids=ids[None, begin:end], position_ids=positions).logits
            total = total + F.cross_entropy(logits[0, :, :VOCABULARY], labels[begin:end], reduction="sum")
    total.backward()
    return total, [parameter.grad for parameter in model.parameters()]


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False
):
    assert causal and not dropout_p and cu_seqlens_q is cu_seqlens_k and cu_seqlens_q.dtype == torch.int32
    assert max_seqlen_q == max_seqlen_k == LENGTH
    document = torch.bucketize(torch.arange(len(q)), cu_seqlens_q, right=True)
    hidden = ~(document[:, None] == document).tril()
    q, k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1).transpose(0, 1) for x in (q, k, v))
    scores = (q @ k.transpose(1, 2) * softmax_scale).masked_fill(hidden, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(0, 1)


def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True).transpose(1, 2)


@pytest.fixture(autouse=True)
def flash_attn(monkeypatch: pytest.MonkeyPatch):
    """Replace flash-attn, which needs a GPU, by stand-ins with the same interface."""
    # transformers looks for the functions of flash-attn here.
    stand_ins = (flash_attn_func, flash_attn_varlen_func, None, None, None)
    monkeypatch.setattr(modeling_flash_attention_utils, "_lazy_imports", lambda *args, **kwargs: stand_ins)
    monkeypatch.setattr(modeling_flash_attention_utils, "_loaded_implementation", None)
    modeling_flash_attention_utils.lazy_import_flash_attention("flash_attention_2")
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("behind", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("family", CONFIGS)
def test_loss_and_gradients_are_those_of_documents_run_alone(family: str, behind: bool) -> None:
    batch = batch_of(STARTS, behind=behind)
    documents = Documents(S, behind=behind)
    found = [row.nonzero().flatten().tolist() for row in documents.starts(batch["input_ids"])]
    assert found == STARTS
    reference, gradients = alone(family, batch, STARTS)
    for attention in ATTENTIONS:
        model = build(family, attention, documents=documents)
        loss = model(**batch, num_items_in_batch=1).loss
        loss.backward()
        assert loss.item() == pytest.approx(reference.item(), rel=1e-6), attention
        for (name, ours), theirs in zip(model.named_parameters(), gradients, strict=True):
            # llama computes norms and positions in fp32 for every dtype
            assert (ours.grad - theirs).abs().max() < 1e-5 * theirs.abs().max(), (attention, name)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_only_the_loss_of_packed_rows_uses_the_document_mask(attention: str) -> None:
    """Logits and per-token losses do not use the document mask."""
    batch = batch_of(STARTS)
    masked, plain = build("gpt2", attention, documents=Documents(S)), build("gpt2", attention)
    assert torch.equal(masked(**batch, reduction="none").loss, plain(**batch, reduction="none").loss)
    assert torch.equal(masked(input_ids=batch["input_ids"]).logits, plain(input_ids=batch["input_ids"]).logits)


@pytest.mark.parametrize(("attention", "checkpointing"), [("causal_sdpa", False), ("flash_attention_2", True)])
def test_one_graph_for_any_number_of_documents(attention: str, checkpointing: bool) -> None:
    eager, model = (build("gpt2", attention, documents=Documents(S)).train() for _ in range(2))
    if checkpointing:
        model.activation_checkpointing_enable()
    compile_loss(model, backend="aot_eager")
    for starts in (STARTS, [[0], [0], [0], [0]], [list(range(LENGTH))] * 4, [[0, 9]] * 4):
        for each in (eager, model):
            each.zero_grad()
            each(**batch_of(starts)).loss.backward()
        for (name, ours), theirs in zip(model.named_parameters(), eager.parameters(), strict=True):
            assert torch.allclose(ours.grad, theirs.grad, rtol=1e-5, atol=1e-7), name
    assert model.compiled_graphs == ["training"]


def test_flash_attention_with_document_lengths_is_timed_and_compared() -> None:
    flash = AttentionInterface()["flash_attention_2"]
    AttentionInterface.register("flash_stand_in", flash)
    AttentionInterface.register("flash_across", lambda *args, cu_seq_lens_q=None, **kwargs: flash(*args, **kwargs))
    names = dict.fromkeys(("flash_stand_in", "flash_across", "causal_sdpa"))
    machine = Machine(cuda=False, bf16=False, length=LENGTH, document_mask=True)
    timings = time_kernels(names, machine, CONFIGS["llama"], rows=4)
    assert isinstance(timings["flash_stand_in"], float) and "differs" in timings["flash_across"]

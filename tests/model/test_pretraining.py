"""The forward pass for pre-training has the same results as transformers' models."""

import os
import subprocess
import sys
import types
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode

from gpt2_repro.model import pretraining
from gpt2_repro.model.pretraining import chunked_cross_entropy, plain_model
from gpt2_repro.tokens import IGNORED
from tests.commands import ROOT
from tests.model.families import CONFIGS, PADDED, VOCABULARY, build


@pytest.fixture
def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(0, VOCABULARY, (3, 17), generator=torch.Generator().manual_seed(1))
    labels = ids[:, 1:].clone()
    labels[1, 5:] = IGNORED
    return {"input_ids": ids[:, :-1], "shift_labels": labels}


@pytest.mark.parametrize("family", CONFIGS)
def test_loss_and_gradients_are_the_stock_models(family: str, batch) -> None:
    model, plain = build(family), build(family, attention="eager")
    loss = model(**batch, labels=batch["shift_labels"]).loss
    loss.backward()
    logits = type(plain).forward(plain, input_ids=batch["input_ids"]).logits[..., :VOCABULARY]
    reference = F.cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten(), ignore_index=IGNORED)
    reference.backward()
    assert loss.item() == pytest.approx(reference.item(), rel=1e-6)
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.allclose(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6), name


@pytest.mark.parametrize("chunk", [1, 32, 1024])
def test_chunking_does_not_change_the_loss(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretraining, "chunk_size", lambda weight: chunk)
    hidden, weight = torch.randn(48, 8).requires_grad_(), torch.randn(PADDED, 8).requires_grad_()
    labels = torch.randint(0, VOCABULARY, (48,))
    labels[3:7] = IGNORED
    total = chunked_cross_entropy(hidden, weight, labels, vocab_size=VOCABULARY)
    plain = F.cross_entropy(hidden @ weight[:VOCABULARY].T, labels, ignore_index=IGNORED, reduction="sum")
    assert total.item() == pytest.approx(plain.item(), rel=1e-6) and total.dtype == torch.float32
    ours, theirs = (torch.autograd.grad(loss / 7, (hidden, weight)) for loss in (total, plain))
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(ours, theirs, strict=True))
    assert ours[1][VOCABULARY:].abs().max() == 0  # padding ids get no gradient from the softmax


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_triton_kernel_computes_the_loss(dtype: torch.dtype, compiled: bool, monkeypatch) -> None:
    monkeypatch.setattr(pretraining, "chunk_size", lambda weight: 32)
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 8, generator=generator).to(dtype).requires_grad_() for n in (48, PADDED))
    labels = torch.randint(0, VOCABULARY, (48,), generator=generator)
    labels[3:7] = IGNORED
    results = []
    for devices in ((), ("cpu",)):
        monkeypatch.setattr(pretraining, "TRITON_DEVICES", devices)
        torch._dynamo.reset()
        loss_of = torch.compile(chunked_cross_entropy, backend="aot_eager", fullgraph=True, disable=not compiled)
        total = loss_of(hidden, weight, labels, vocab_size=VOCABULARY)
        results.append([total.detach(), *torch.autograd.grad(total / 7, (hidden, weight))])
    for ours, plain in zip(results[1], results[0], strict=True):
        assert ours.dtype == plain.dtype and (ours - plain).norm() <= 4 * torch.finfo(dtype).eps * plain.norm()
    assert results[1][2][VOCABULARY:].abs().max() == 0
    assert "gpt2_repro.model.softmax_kernel" in sys.modules


@pytest.mark.parametrize("kernel", ["torch", "triton"])
@pytest.mark.parametrize("size", [1.0, 6e4, 1e7])
def test_the_loss_of_large_logits_is_not_cancelled(kernel: str, size: float) -> None:
    """The normalizer is small next to the largest logit: it would be rounded if both were added."""
    generator = torch.Generator().manual_seed(0)
    logits = size + torch.randn(64, PADDED, generator=generator)
    labels = torch.randint(0, VOCABULARY, (64,), generator=generator)
    expected = F.cross_entropy(logits[:, :VOCABULARY].double(), labels, reduction="none")
    if kernel == "triton":
        from gpt2_repro.model.softmax_kernel import replace_by_gradient

        losses = replace_by_gradient(logits.clone(), labels, VOCABULARY)
    else:
        losses = pretraining._cross_entropy(logits, torch.eye(PADDED), labels, VOCABULARY, True)[0].flatten()
    assert losses.dtype == torch.float32
    assert torch.allclose(losses.double(), expected, rtol=1e-6, atol=1e-6)


COMPILE = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from gpt2_repro.model.softmax_kernel import BLOCK, WARPS, cross_entropy_kernel
types = {"logits_pointer": "*bf16", "labels": "*i64", "losses": "*fp32", "stride": "i32"}
constants = {"vocab_size": 50257, "padded_size": 50304, "BLOCK": BLOCK}
source = ASTSource(cross_entropy_kernel, {**types, **dict.fromkeys(constants, "constexpr")}, constants)
for capability in (75, 80, 90, 120):
    assert compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": WARPS}).asm["cubin"]
"""


def test_the_triton_kernel_compiles_for_each_generation(tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    subprocess.run([sys.executable, "-c", COMPILE], cwd=ROOT, env=environment, check=True)


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


@pytest.mark.skipif(torch.__version__ < "2.10", reason="torch 2.9 has no products of bf16 with fp32 results")
def test_the_gradient_of_the_head_is_summed_without_rounding_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretraining, "TRITON_DEVICES", ("cuda",))
    context = types.SimpleNamespace(needs_input_grad=[True], save_for_backward=lambda *tensors: None)
    with FakeTensorMode(), torch.device("cuda:0"), mock.patch.object(torch, "mm", wraps=torch.mm) as product:
        hidden, weight = (torch.empty(size, 8, dtype=torch.bfloat16) for size in (64, PADDED))
        labels = torch.zeros(64, dtype=torch.long)
        pretraining._ChunkedCrossEntropy.forward(context, hidden, weight, labels, VOCABULARY, chunk=32)
    assert [call.kwargs for call in product.call_args_list] == [{"out_dtype": torch.float32}] * 2


@pytest.mark.parametrize("family", CONFIGS)
def test_the_plain_model_computes_and_writes_the_same(family: str, batch) -> None:
    ids, model = batch["input_ids"], build(family).eval()
    plain = plain_model(model.config, model.state_dict())
    assert plain.config.vocab_size == plain.get_input_embeddings().num_embeddings == VOCABULARY
    assert not hasattr(plain.config, "true_vocab_size")
    assert torch.allclose(plain(ids).logits, model(input_ids=ids).logits, atol=1e-5)
    prompt = {"input_ids": ids[:1, :4], "attention_mask": torch.ones_like(ids[:1, :4])}
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(**prompt, **options), plain.generate(**prompt, **options))


def test_weights_that_do_not_fit_are_refused() -> None:
    model = build("gpt2")
    with pytest.raises(ValueError, match=r"module\.x"):
        plain_model(model.config, model.state_dict() | {"module.x": torch.zeros(1)})

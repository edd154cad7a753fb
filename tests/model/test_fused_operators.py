"""Attention and MLPs with kernels of cuDNN and cuBLASLt, which simple functions replace here."""

import copy
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, scaled_dot_product_attention

from gpt2_repro.errors import UserError
from gpt2_repro.model import attention, gelu_products, mlp, packed_attention
from gpt2_repro.model.attention import Machine, choose_attention
from gpt2_repro.model.build import build_model, compile_loss
from gpt2_repro.model.mlp import require_mlp
from tests.model.families import configuration


HEADS = 4
LENGTH = 128
VOCABULARY = 90
GPU = Machine(cuda=True, bf16=True, length=LENGTH)
CASES = {
    "attention": {"attention": "packed_cudnn"},
    "mlp": {"attention": "causal_sdpa", "mlp": "cublaslt"},
    "both": {"attention": "packed_cudnn", "mlp": "cublaslt"},
}


class Calls:
    """Simple functions in place of the kernels, which count their calls and check their arguments."""

    def __init__(self) -> None:
        self.attention = 0
        self.attention_gradients = 0
        self.products = 0
        self.product_gradients = 0

    def run_forward(self, query: Tensor, key: Tensor, value: Tensor, out: Tensor, log_sums: Tensor) -> None:
        self.attention += 1
        assert is_one_tensor([query, key, value])
        assert log_sums.dtype == torch.float32 and log_sums.shape == (*query.shape[:3], 1)
        out.copy_(scaled_dot_product_attention(query, key, value, is_causal=True))
        scores = query.float() @ key.float().transpose(2, 3) / math.sqrt(query.shape[3])
        later = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        log_sums.copy_(scores.masked_fill(later, -torch.inf).logsumexp(3, keepdim=True))

    def run_backward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        log_sums: Tensor,
        gradient: Tensor,
        results: list[Tensor],
    ) -> None:
        """Compute the gradients from the saved output and sums, as the kernel does."""
        self.attention_gradients += 1
        assert is_one_tensor([query, key, value]) and is_one_tensor(results)
        query, key, value, out, gradient = (tensor.float() for tensor in (query, key, value, out, gradient))
        scale = 1 / math.sqrt(query.shape[3])
        scores = query @ key.transpose(2, 3) * scale
        later = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        probabilities = (scores - log_sums).masked_fill(later, -torch.inf).exp()
        of_probabilities = gradient @ value.transpose(2, 3)
        of_scores = probabilities * (of_probabilities - (gradient * out).sum(3, keepdim=True)) * scale
        results[0].copy_(of_scores @ key)
        results[1].copy_(of_scores.transpose(2, 3) @ query)
        results[2].copy_(probabilities.transpose(2, 3) @ gradient)

    def run_gelu_product(self, inputs: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        self.products += 1
        before = torch.addmm(bias, inputs, weight)
        return before, gelu(before, approximate="tanh")

    def run_gelu_gradient_product(self, gradient: Tensor, weight: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        self.product_gradients += 1
        grad_before = gradient @ weight.T * derivative_of_gelu(before)
        return grad_before, grad_before.sum(0)


def derivative_of_gelu(x: Tensor) -> Tensor:
    """Return the derivative of the tanh approximation."""
    scale = math.sqrt(2 / math.pi)
    tanh = torch.tanh(scale * (x + 0.044715 * x**3))
    return (1 + tanh) / 2 + x / 2 * (1 - tanh**2) * scale * (1 + 3 * 0.044715 * x**2)


def is_one_tensor(parts: list[Tensor]) -> bool:
    """Return whether parts [rows, heads, T, head size] are the thirds of one tensor [rows, T, 3, heads, head size]."""
    head_size = parts[0].shape[3]
    width = HEADS * head_size
    strides = (LENGTH * 3 * width, head_size, 3 * width, 1)
    first = parts[0].data_ptr()
    step = width * parts[0].element_size()
    return all(
        part.stride() == strides and part.data_ptr() == first + number * step for number, part in enumerate(parts)
    )


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    """Replace the kernels, and allow fp32."""
    found = Calls()
    monkeypatch.setattr(packed_attention, "run_forward", found.run_forward)
    monkeypatch.setattr(packed_attention, "run_backward", found.run_backward)
    monkeypatch.setattr(gelu_products, "run_gelu_product", found.run_gelu_product)
    monkeypatch.setattr(gelu_products, "run_gelu_gradient_product", found.run_gelu_gradient_product)
    monkeypatch.setattr(packed_attention, "DTYPES", (torch.bfloat16, torch.float16, torch.float32))
    torch._dynamo.reset()
    yield found
    torch._dynamo.reset()


def build(**options: Any) -> Any:
    torch.manual_seed(0)
    config = configuration(sequence_length=LENGTH, vocab_size=VOCABULARY)
    return build_model(config, **options).train()


def batch(seed: int = 1, length: int = LENGTH) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCABULARY, (3, length + 1), generator=generator)
    return {"input_ids": ids[:, :-1].contiguous(), "shift_labels": ids[:, 1:].contiguous()}


def train(model: Any, steps: int = 3) -> list[float]:
    """Return the losses of some steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses: list[float] = []
    for step in range(steps):
        loss = model(**batch(step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("case", CASES)
def test_losses_gradients_and_steps_equal_those_of_the_stock_model(case: str, calls: Calls) -> None:
    plain = build(attention="causal_sdpa")
    fused = build(**CASES[case])
    for model in (plain, fused):
        model(**batch()).loss.backward()
    expected = dict(plain.named_parameters())
    for name, parameter in fused.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name].grad, rtol=1e-4, atol=1e-6, msg=name)
    plain.zero_grad()
    fused.zero_grad()
    assert train(fused) == pytest.approx(train(plain), abs=1e-4)
    assert plain.state_dict().keys() == fused.state_dict().keys()
    uses_attention = case != "mlp"
    assert calls.attention == calls.attention_gradients == 2 * 4 * uses_attention  # 2 blocks, 4 passes
    uses_products = case != "attention"
    assert calls.products == calls.product_gradients == 2 * 4 * uses_products


@pytest.mark.parametrize("case", CASES)
def test_the_loss_is_one_compiled_graph(case: str, calls: Calls) -> None:
    eager = build(**CASES[case])
    compiled = copy.deepcopy(eager)
    compile_loss(compiled, backend="aot_eager")  # fullgraph=True
    assert train(compiled, 2) == pytest.approx(train(eager, 2), abs=1e-5)
    assert compiled.compiled_graphs == ["training"]
    assert compiled.config._attn_implementation == CASES[case]["attention"]  # not replaced after a failure


def test_checkpointed_blocks_have_the_same_gradients(calls: Calls) -> None:
    models = [build(**CASES["both"]), build(**CASES["both"])]
    models[1].activation_checkpointing_enable()
    for model in models:
        model(**batch()).loss.backward()
    for plain, checkpointed in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(plain.grad, checkpointed.grad)
    assert calls.attention == 2 + 4  # twice in the second model


def test_other_lengths_use_the_stock_modules(calls: Calls) -> None:
    plain, fused = build(attention="causal_sdpa"), build(**CASES["both"])
    short = batch(length=100)
    with torch.no_grad():
        torch.testing.assert_close(fused(**short).loss, plain(**short).loss)
    assert calls.attention == calls.products == 0
    generated = [
        model.generate(batch(length=5)["input_ids"], max_new_tokens=5, do_sample=False, pad_token_id=0)
        for model in (plain, fused)
    ]
    assert generated[0].tolist() == generated[1].tolist()


def test_products_use_the_dtype_of_autocast(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_attention, "DTYPES", (torch.bfloat16,))
    plain, fused = build(attention="causal_sdpa"), build(**CASES["both"])
    losses: list[float] = []
    for model in (plain, fused):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**batch()).loss
        loss.backward()
        losses.append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-2) and calls.products == calls.attention_gradients == 2
    assert all(parameter.grad.dtype == torch.float32 for parameter in fused.parameters())


def test_the_operators_follow_the_rules_of_torch(calls: Calls) -> None:
    generator = torch.Generator().manual_seed(0)
    projection = torch.randn(2, LENGTH, 3 * 32, generator=generator, requires_grad=True)
    torch.library.opcheck(packed_attention.attend, (projection, HEADS))
    projection = projection.detach()
    out, log_sums = packed_attention.attend(projection, HEADS)
    torch.library.opcheck(packed_attention.attend_backward, (torch.ones_like(out), projection, out, log_sums, HEADS))
    inputs, weight, bias = torch.randn(8, 32), torch.randn(32, 64), torch.randn(64)
    torch.library.opcheck(gelu_products.gelu_product, (inputs, weight, bias))
    before = torch.randn(8, 64)
    torch.library.opcheck(gelu_products.gelu_gradient_product, (inputs, torch.randn(64, 32), before))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that there is an H100 with the two packages."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    for module in (attention, mlp):
        monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: object())


@pytest.mark.parametrize(
    ("machine", "model", "reason"),
    [
        ({"cuda": False}, {}, "there is no NVIDIA"),
        ({"bf16": False}, {}, "bf16 or fp16"),
        ({"length": 1000}, {}, "128"),
        ({"document_mask": True}, {}, "document masks"),
        ({}, {"model_type": "llama"}, "model_type gpt2"),
        ({}, {"dropout": 0.1}, "no dropout"),
        ({}, {"n_head": 8}, "head size 4"),
    ],
)
def test_where_packed_attention_is_refused(machine: dict, model: dict, reason: str, gpu: None) -> None:
    config = configuration(**model)
    with pytest.raises(UserError, match=rf"packed_cudnn cannot be used: .*{reason}.*--attn_implementation auto"):
        choose_attention("packed_cudnn", GPU._replace(**machine), config, rows=2)


@pytest.mark.parametrize(
    ("machine", "model", "reason"),
    [
        ({"cuda": False}, {}, "there is no NVIDIA"),
        ({"bf16": False}, {}, "bf16 or fp16"),
        ({"length": 1000}, {}, "128"),
        ({}, {"model_type": "llama"}, "model_type gpt2"),
        ({}, {"overrides": "activation_function=relu"}, "no relu"),
        ({}, {"overrides": "n_inner=100"}, "width 100"),
    ],
)
def test_where_gelu_products_are_refused(machine: dict, model: dict, reason: str, gpu: None) -> None:
    config = configuration(**model)
    with pytest.raises(UserError, match=rf"cublaslt cannot be used: .*{reason}.*--mlp_implementation torch"):
        require_mlp("cublaslt", GPU._replace(**machine), config)
    require_mlp("torch", GPU._replace(**machine), config)


def test_divided_weights_are_refused(gpu: None) -> None:
    with pytest.raises(UserError, match="ZeRO-3 and FSDP2 divide the weights"):
        require_mlp("cublaslt", GPU, configuration(), has_whole_weights=False)


@pytest.mark.parametrize("module", [attention, mlp])
def test_a_missing_package_is_named(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="is not installed"):
        if module is attention:
            choose_attention("packed_cudnn", GPU, configuration(), rows=2)
        else:
            require_mlp("cublaslt", GPU, configuration())


@pytest.mark.parametrize("factor", [1.0, 1.2])
def test_a_wrong_mlp_is_refused(factor: float, calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    def product(*args: Tensor) -> tuple[Tensor, Tensor]:
        before, after = calls.run_gelu_product(*args)
        return before, after * factor

    monkeypatch.setattr(gelu_products, "run_gelu_product", product)
    failure = mlp.find_failure(Machine(cuda=False, bf16=True, length=LENGTH), configuration())
    if factor == 1.0:
        assert failure is None
    else:
        assert failure is not None and "it differs from torch by" in failure

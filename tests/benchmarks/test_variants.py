"""Variants of the model change neither its loss nor its gradients."""

import pytest
import torch

from benchmarks.variants import VARIANTS
from gpt2_repro.model.build import build_model
from tests.model.families import configuration


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_changes_no_gradient(name: str, bf16: bool) -> None:
    ids = torch.arange(3 * 64).view(3, 64)
    results = []
    for variant in (None, name):
        torch.manual_seed(0)
        config = configuration(n_head=2, sequence_length=64, vocab_size=300)
        model = build_model(config, attention="causal_sdpa")
        for weight in model.parameters():  # biases are 0 at first
            weight.data += 0.1 * torch.randn_like(weight)
        if variant:
            VARIANTS[variant](model)
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = model(input_ids=ids, shift_labels=ids).loss
        loss.backward()
        results.append((loss, {name: weight.grad for name, weight in model.named_parameters()}))
    (expected, theirs), (loss, ours) = results
    assert torch.allclose(loss, expected, rtol=1e-6)
    for name, gradient in theirs.items():
        assert (ours[name] - gradient).norm() <= (2e-3 if bf16 else 1e-5) * gradient.norm(), name

"""The compiled loss equals the eager loss.

With causal attention, the compiled loss is a single graph.
"""

import os
from pathlib import Path

import pytest
import torch
from torch._functorch._aot_autograd.autograd_cache import check_cacheable
from transformers import PreTrainedModel

from gpt2_repro.model import build as building
from gpt2_repro.model.build import build_model, compile_loss
from tests.model.families import configuration


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


KINDS = {
    "gpt2": "",
    "llama": "num_key_value_heads=1,intermediate_size=48",
    "mixtral": "num_key_value_heads=1,intermediate_size=24,router_aux_loss_coef=0.1",
}


def build(kind: str = "gpt2") -> PreTrainedModel:
    torch.manual_seed(0)
    return build_model(configuration(kind, KINDS[kind], vocab_size=200), attention="causal_sdpa").train()


@pytest.fixture
def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 90, (3, 17), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids[:, :-1].contiguous(), "shift_labels": ids[:, 1:].contiguous()}


@pytest.mark.parametrize("attention", ["causal_sdpa", "causal_cudnn"])
def test_the_traced_loss_can_be_cached(batch, attention: str) -> None:
    """Otherwise each start traces and partitions the loss again, although the generated code is cached."""
    model, checked = build(), list[bool]()
    model.set_attn_implementation(attention)

    def backend(graph, inputs):
        check_cacheable(graph)  # raises BypassAOTAutogradCache
        checked.append(True)
        return graph

    compile_loss(model, backend=backend)
    model(**batch)
    assert checked == [True] and model.config._attn_implementation == attention  # not replaced after a failure


MOE_CASE = pytest.param(
    "mixtral",
    True,
    marks=pytest.mark.skipif(torch.__version__ < "2.10", reason="torch 2.9 cannot trace checkpoints of experts"),
)


@pytest.mark.parametrize(("kind", "checkpointing"), [("gpt2", False), ("gpt2", True), ("llama", False), MOE_CASE])
def test_one_causal_graph_without_logits_equals_the_eager_loss(batch, kind: str, checkpointing: bool) -> None:
    eager, model = build(kind=kind), build(kind=kind)
    if checkpointing:
        model.activation_checkpointing_enable()
    attentions: list[dict] = []

    def backend(graph, inputs):
        for module in graph.modules():  # recomputed layers are subgraphs
            calls = [node for node in getattr(module, "graph", graph.graph).nodes if node.op == "call_function"]
            attentions.extend(node.kwargs for node in calls if "scaled_dot_product_attention" in str(node.target))
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    compile_loss(model, backend=backend)
    losses = [each(**batch).loss for each in (eager, model)]
    for loss in losses:
        loss.backward()
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-6)
    for (name, ours), theirs in zip(model.named_parameters(), eager.parameters(), strict=True):
        assert torch.allclose(ours.grad, theirs.grad, atol=1e-7), name
    assert model.compiled_graphs == ["training"]
    assert [(call["is_causal"], call.get("attn_mask")) for call in attentions] == [(True, None)] * 2


@pytest.fixture
def process_group(tmp_path: Path):
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("processes", [1, 2])
def test_the_graphs_of_ddp(processes: int, batch, process_group, monkeypatch: pytest.MonkeyPatch) -> None:
    """A single process compiles one graph. With more, gradients are reduced in buckets while others are computed."""
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    monkeypatch.setattr(torch.distributed, "_DEFAULT_FIRST_BUCKET_BYTES", 10_000)
    eager, model = build(), build()
    compile_loss(model, backend="aot_eager")
    wrapped = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.02)
    losses = []
    for _ in range(2):
        losses.append(wrapped(**batch).loss)
        losses[-1].backward()
    expected = eager(**batch).loss
    expected.backward()
    assert [loss.item() for loss in losses] == pytest.approx([expected.item()] * 2, rel=1e-6)
    for (name, ours), theirs in zip(model.named_parameters(), eager.parameters(), strict=True):
        assert torch.allclose(ours.grad, 2 * theirs.grad, atol=1e-6), name
    graphs = len(model.compiled_graphs)
    assert set(model.compiled_graphs) == {"training"}
    assert graphs == 1 if processes == 1 else graphs > 1


def test_validation_has_a_graph_of_its_own_and_sampling_none(batch) -> None:
    model = build()
    compile_loss(model, backend="aot_eager")
    for _ in range(2):
        model(**batch).loss.backward()
    with torch.no_grad():
        model.eval()(**batch)
    for length in (3, 5):
        prompt = batch["input_ids"][:1, :length]
        model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=3, pad_token_id=0)
    assert model.compiled_graphs == ["training", "validation"]


def test_compiled_code_is_cached_next_to_the_runs(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    default = str(tmp_path / ".cache" / "inductor")
    chosen = str(tmp_path / "chosen")  # torch makes this folder
    for given, expected in ((building.default_cache_dir(), default), (chosen, chosen)):
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", given)
        compile_loss(build(), backend="aot_eager")
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == expected

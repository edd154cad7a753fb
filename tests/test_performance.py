"""A training step has at most a fixed number of operations and host syncs."""

import functools
import itertools
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

from benchmarks.saved_bytes import saved_bytes_per_token
from gpt2_repro.model import pretraining
from gpt2_repro.model.arguments import ModelArguments
from gpt2_repro.model.build import build_model
from gpt2_repro.model.configuration import build_config
from gpt2_repro.model.document_mask import Documents
from gpt2_repro.recipe import load_recipe
from gpt2_repro.training.engine import add_gradients_directly
from gpt2_repro.training.settings import resolve_settings, to_training_arguments
from tests.commands import ROOT


LAYERS, WIDTH, LENGTH = 3, 128, 64
Call = Callable[[PreTrainedModel, torch.Tensor], torch.Tensor]
# Operations that move no data and launch no kernel.
VIEWS = {"view", "_unsafe_view", "transpose", "t", "permute", "unsqueeze", "squeeze", "expand", "slice", "split"}
VIEWS |= {"select", "detach", "alias", "as_strided", "unbind"}


class Counter(TorchDispatchMode):
    """Count the host syncs (`syncs`) and the tensor operations (`operations`).

    Views are not counted, because views do not move data. `places` has the file and line of each host sync outside
    of torch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations = self.syncs = 0
        self.places: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name.split("::")[1]
        if name in ("_local_scalar_dense", "nonzero", "is_nonzero"):
            self.syncs += 1
            frames = [frame for frame in traceback.extract_stack() if "/torch/" not in frame.filename]
            self.places.append(f"{frames[-2].filename}:{frames[-2].lineno}")
        self.operations += name not in VIEWS
        return function(*args, **(kwargs or {}))


class LargeTensors(TorchDispatchMode):
    """Measure how many bytes the tensors of at least `smallest` bytes have at the same time (`peak`)."""

    def __init__(self, smallest: int) -> None:
        super().__init__()
        self.smallest, self.peak = smallest, 0
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.untyped_storage().nbytes() >= self.smallest:
            storage = StorageWeakRef(result.untyped_storage())
            self.storages[storage.cdata] = storage, result.untyped_storage().nbytes()
        self.storages = {key: entry for key, entry in self.storages.items() if not entry[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.storages.values()))
        return result


@pytest.fixture
def stock() -> tuple[PreTrainedModel, Call]:
    """Return a stock GPT-2 of transformers and a function that computes its loss."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=512, n_positions=LENGTH, n_layer=LAYERS, n_head=2, n_embd=WIDTH, use_cache=False)
    return GPT2LMHeadModel(config).train(), lambda model, rows: model(input_ids=rows, labels=rows).loss


@pytest.fixture
def ours() -> tuple[PreTrainedModel, Call]:
    torch.manual_seed(0)
    args = ModelArguments(n_layer=LAYERS, n_head=2, n_embd=WIDTH)
    config = build_config(args, sequence_length=LENGTH, vocab_size=500)
    model = build_model(config, attention="causal_sdpa").train()
    return model, lambda model, rows: model(input_ids=rows, shift_labels=rows.roll(-1, 1)).loss


def count(model: PreTrainedModel, call: Call) -> Counter:
    counter, batch = Counter(), torch.randint(0, 500, (2, LENGTH))
    with counter:
        with torch.autocast("cpu", torch.bfloat16):
            loss = call(model, batch)
        loss.backward()
    return counter


def test_fewer_operations_than_stock_and_no_wait(stock, ours) -> None:
    theirs, mine = count(*stock), count(*ours)
    # 206 compared with 385 for three layers: the activation is one kernel, and there is no dropout and no mask.
    assert mine.operations < 0.55 * theirs.operations
    assert (mine.syncs, theirs.syncs > 0) == (0, True)


def test_memory_of_a_token(stock, ours) -> None:
    unit = LAYERS * WIDTH  # one byte for each channel of each block
    model, call = ours
    saved = saved_bytes_per_token(model, call, length=LENGTH)
    # 12 blocks of width 768: 0.33 MB per token, 22 GB for 64 x 1024. Stock GPT-2: over twice that, and its logits.
    assert saved < 42 * unit
    assert saved_bytes_per_token(*stock, length=LENGTH) > 2.2 * saved
    # All layers share one bf16 document mask, which causes no host sync.
    model.documents = Documents(separator=0)
    assert saved_bytes_per_token(model, call, length=LENGTH) - saved == 2 * LENGTH
    assert count(model, call).syncs == 0
    model.activation_checkpointing_enable()
    assert saved_bytes_per_token(model, call, length=LENGTH) < 8 * unit


@pytest.mark.parametrize(("dtype", "bytes_per_logit"), [(torch.bfloat16, 6), (torch.float32, 4)])
def test_memory_of_a_logit(dtype: torch.dtype, bytes_per_logit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss holds the logits of one chunk, in fp32 and as rounded matrix products, and nothing of earlier chunks."""
    chunk, vocabulary = 64, 512
    monkeypatch.setattr(pretraining, "chunk_size", lambda weight: chunk)
    hidden, weight = (torch.randn(rows, 8, dtype=dtype, requires_grad=True) for rows in (4 * chunk, vocabulary))
    with LargeTensors(2 * chunk * vocabulary) as large:
        labels = torch.randint(vocabulary, (4 * chunk,))
        pretraining.chunked_cross_entropy(hidden, weight, labels, vocab_size=vocabulary).backward()
    assert large.peak == bytes_per_logit * chunk * vocabulary


TWO_PASSES = ("--trainer", "dataloader_prefetch_factor=2")


@pytest.mark.parametrize(("workers", "options", "ahead"), [(2, (), 4), (3, (), 3), (0, (), None), (2, TWO_PASSES, 2)])
def test_the_workers_read_a_step_ahead(workers: int, options: tuple[str, ...], ahead: int, tmp_path: Path) -> None:
    words = ["--tokens_per_step", "512", "--sequence_length", "32", "--per_device_train_batch_size", "2", "--use_cpu"]
    words += ["--output_dir", str(tmp_path / "run"), "--max_steps", "2", "--warmup_steps", "1", *options]
    args = to_training_arguments(*resolve_settings(load_recipe([*words, "--dataloader_num_workers", str(workers)])))
    assert (args.gradient_accumulation_steps, args.dataloader_prefetch_factor) == (8, ahead)


def test_a_bf16_gradient_is_added_without_a_copy() -> None:
    from deepspeed.runtime import bf16_optimizer

    weight, operations = torch.nn.Parameter(torch.zeros(3, 5, dtype=torch.bfloat16)), []
    weight.grad = torch.randn(3, 5).bfloat16()
    BF16_Optimizer = type("BF16_Optimizer", (), {"autoep_folding_tp_group": None})
    optimizers, start = [BF16_Optimizer(), BF16_Optimizer()], torch.randn(15)
    add_gradients_directly(optimizers[1])
    optimizers[0]._update_hp_grad = functools.partial(bf16_optimizer.BF16_Optimizer._update_hp_grad, optimizers[0])
    for optimizer in optimizers:
        optimizer.fp32_groups_gradients, optimizer.fp32_groups_has_gradients = [[start.clone()]], [[False]]
        with Counter() as counter:
            optimizer._update_hp_grad(weight, 0, 0, False)
        operations.append(counter.operations)
    deepspeeds, ours = (optimizer.fp32_groups_gradients[0][0] for optimizer in optimizers)
    assert torch.equal(deepspeeds, ours) and not torch.equal(ours, start)
    assert optimizers[1].fp32_groups_has_gradients == [[True]] and operations == [2, 1]


# Writes the numbers of host syncs and collectives of rank 0 before each forward pass.
COUNTED_RUN = """
import json, os, sys
import torch.distributed as dist
from tests.test_performance import Counter
import train
from gpt2_repro.training.trainer import PretrainingTrainer

collectives, passes, counter, training_step = [], [], Counter(), PretrainingTrainer.training_step
def counted(function):
    return lambda *args, **kwargs: collectives.append(1) or function(*args, **kwargs)
def noted(*args, **kwargs):
    passes.append((counter.syncs, len(collectives), list(counter.places)))
    counter.places.clear()
    return training_step(*args, **kwargs)

PretrainingTrainer.training_step = noted
for name in dir(dist):
    if name.startswith(("all_reduce", "all_gather", "reduce", "broadcast", "barrier")) and callable(getattr(dist, name)):
        setattr(dist, name, counted(getattr(dist, name)))
with counter:
    train.main(sys.argv[2:])
if os.environ["RANK"] == "0":
    open(sys.argv[1], "w").write(json.dumps(passes))
"""


@pytest.mark.slow
def test_accumulation_adds_no_wait_and_no_collective(type_command, tiny_recipe, tmp_path: Path) -> None:
    script, out = tmp_path / "counted.py", tmp_path / "passes.json"
    script.write_text(COUNTED_RUN, encoding="utf-8")
    options = ("--per_device_train_batch_size", 1, "--max_steps", 4, "--output_dir", tmp_path / "run")
    options += ("--logging_steps", 100, "--bf16", "true", "--accept_any_hardware", "true")
    path = os.pathsep.join([str(ROOT), *sys.path])
    done = type_command("launch", 2, script, out, tiny_recipe, *options, PYTHONPATH=path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "GradientAccumulationPlugin" not in done.stderr  # accelerate warns if its number of passes is another one
    passes = json.loads(out.read_text(encoding="utf-8"))
    # Four passes per step. Only the last one is followed by host syncs and collectives.
    assert len(passes) == 16
    counts = [each[:2] for each in passes]
    added = [[now - before for before, now in zip(*pair, strict=True)] for pair in itertools.pairwise(counts)]
    assert [counts for number, counts in enumerate(added, start=1) if number % 4] == [[0, 0]] * 12
    assert all(min(counts) > 0 for counts in added[3::4]), added
    # The syncs of the second and third step: ranks.py reads a CPU tensor. In fp32, on a CPU without bf16 instructions,
    # DeepSpeed and guard.py read the gradient norm.
    places = {Path(place).name.split(":")[0] for each in passes[5:13] for place in each[2]}
    precision = json.loads((tmp_path / "run" / "environment.json").read_text(encoding="utf-8"))["precision"]
    assert places == {"ranks.py"} | ({"utils.py", "guard.py"} if precision == "fp32" else set()), passes[5:13]

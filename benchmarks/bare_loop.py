"""Save initial weights, check a final model, or train with a bare PyTorch loop.

    python benchmarks/bare_loop.py start DATA OUT '{"n_layer": 12, "n_head": 12, "n_embd": 768, "n_positions": 1024}'
    python benchmarks/bare_loop.py stock FINAL START DATA ROWS OUT.json
    python benchmarks/bare_loop.py bare RUN OUT.json

real_run.py runs these commands and compares the results with a run of train.py.
"""

import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor


sys.path.insert(0, str(Path(__file__).parents[1]))

SEED = 1337


class Masters:
    """fp32 masters and gradient sums of a model's weights, which become bf16.

    The rounding is that of DeepSpeed's ZeRO-1 (0.19.8): the masters start as the rounded weights, and gradients of a
    pass are bf16.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.weights = list(model.bfloat16().parameters())
        self.masters = [torch.nn.Parameter(weight.detach().float()) for weight in self.weights]

    def add_gradients(self) -> None:
        """Add the gradients of a pass to the sums, and delete them."""
        for weight, master in zip(self.weights, self.masters, strict=True):
            master.grad = weight.grad.float() if master.grad is None else master.grad.add_(weight.grad)
            weight.grad = None

    @torch.no_grad()
    def round(self) -> None:
        """Set the weights to the rounded masters."""
        for weight, master in zip(self.weights, self.masters, strict=True):
            weight.copy_(master)


def loop(
    model: Any,
    batches: Iterator[Any],
    loss_of: Callable[[Any, Any], Tensor],
    *,
    steps: int,
    passes: int,
    bf16: bool,
    masters: Masters | None = None,
    clip: float,
    decay: float,
    rate: Callable[[int], float],
    **adam: Any,
) -> Iterator[Tensor]:
    """Train, and yield the sum of the `passes` losses of each step.

    Without `masters`, bf16 means autocast. `adam` contains arguments of AdamW.
    """
    device = next(model.parameters()).device
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=bf16 and masters is None)
    updated = masters.masters if masters else list(model.parameters())
    groups: list[dict[str, Any]] = [
        {"params": [p for p in updated if p.dim() >= 2], "weight_decay": decay},
        {"params": [p for p in updated if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, fused=True, **adam)
    ahead = next(batches)
    for step in range(steps):
        total = torch.zeros((), device=device)
        for _ in range(passes):
            with autocast:
                loss = loss_of(model, ahead)
            loss.backward()
            if masters:
                masters.add_gradients()
            total += loss.detach()
            ahead = next(batches, None)  # rows are read while the GPU computes
        torch.nn.utils.clip_grad_norm_(updated, clip)
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if masters:
            masters.round()
        yield total


def start(data: str, out: str, shape: str) -> None:
    """Save a freshly initialized stock GPT-2 in fp32 to the folder `out`.

    The model has the vocabulary size and the special ids of the tokenizer in `data`, a folder of prepared data.
    `shape` contains the arguments of GPT2Config as a JSON object.
    """
    # `start` and `stock` use transformers without this project's package.
    from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

    tokenizer = AutoTokenizer.from_pretrained(Path(data, "tokenizer"))
    special = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    torch.manual_seed(SEED)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), **json.loads(shape), **special))
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def stock(final: str, start: str, data: str, rows: str, out: str) -> None:
    """Compute the fp32 loss of a final model, and compare the model with `start`.

    `start` is the folder of a model that stock transformers saved. The names and shapes of the weights and the keys of
    config.json are compared. The loss is computed on the first `rows` validation rows of `data`, a folder of prepared
    data. The results are written to the JSON file `out`.
    """
    from datasets import load_from_disk
    from safetensors import safe_open
    from transformers import AutoTokenizer, GPT2LMHeadModel

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = GPT2LMHeadModel.from_pretrained(final).to(device).eval()
    rows_of = load_from_disk(str(Path(data, "validation"))).with_format("numpy")
    ids = torch.tensor(rows_of[: int(rows)]["input_ids"].astype(np.int64))
    total = 0.0
    with torch.no_grad():
        for part in ids.to(device).split(8):
            logits = model(part[:, :-1]).logits.flatten(0, 1)
            total += torch.nn.functional.cross_entropy(logits, part[:, 1:].flatten(), reduction="sum").item()

    described: list[set[Any]] = []
    for folder in (final, start):
        with safe_open(Path(folder, "model.safetensors"), "pt") as weights:
            shapes = {(name, *weights.get_slice(name).get_shape()) for name in weights.keys()}  # noqa: SIM118
        described.append(shapes | set(json.loads(Path(folder, "config.json").read_text(encoding="utf-8"))))
    result = {
        "loss": total / ids[:, 1:].numel(),
        "dtype": str(model.dtype),
        "vocab_size": model.config.vocab_size,
        "tokenizer_ids": len(AutoTokenizer.from_pretrained(final)),
        "activation_function": model.config.activation_function,
        # Tensors (with shapes) and configuration keys that only one of the two folders contains. n_ctx is for llama.cpp.
        "differs_from_stock": sorted(map(str, (described[0] ^ described[1]) - {"n_ctx"})),
        "project_modules": [name for name in sys.modules if name.startswith("gpt2_repro")],
    }
    Path(out).write_text(json.dumps(result), encoding="utf-8")


def bare(run: str, out: str) -> None:
    """Repeat a run with a bare PyTorch loop, and write the loss and time of each step."""
    # Uses the model, the loss and the order of rows of this project, but no Trainer, Accelerate or DeepSpeed.
    from gpt2_repro.data.prepared import PreparedData
    from gpt2_repro.model.build import build_model
    from gpt2_repro.model.configuration import build_config
    from gpt2_repro.recipe import load_recipe

    recipe = load_recipe([f"{run}/recipe.yaml"])
    data, shape, training = recipe.data, recipe.model, recipe.training
    environment = json.loads(Path(run, "environment.json").read_text(encoding="utf-8"))
    plan, engine, device = environment["plan"], environment["engine"], environment["accelerator"]["kind"]

    prepared = PreparedData.read(data.dataset_dir)
    prepared.lock()
    vocabulary = {"vocab_size": prepared.manifest.vocab_size, "tokenizer": prepared.tokenizer}
    config = build_config(shape, sequence_length=data.sequence_length, **vocabulary)
    built = {"attention": environment["attention"].split()[0], "init_from": shape.init_from}
    model = build_model(config, **built, compiled=engine["compiled"]).to(device).train()

    rows_per_step, size = plan["tokens_per_step"] // data.sequence_length, plan["micro_batch_size"]
    batches = micro_batches(prepared.rows("train"), training, rows_per_step=rows_per_step, size=size)

    def loss_of(model: Any, batch: dict[str, Tensor]) -> Tensor:
        batch = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
        return model(**batch, num_items_in_batch=plan["tokens_per_step"]).loss

    losses, seconds, began = [], [], time.perf_counter()
    for total in loop(
        model,
        batches,
        loss_of,
        steps=plan["max_steps"],
        passes=rows_per_step // size,
        bf16=environment["precision"] == "bf16",
        # The same rounding as in the run: bf16 weights with fp32 masters (DeepSpeed), or fp32 weights.
        masters=Masters(model) if engine["weights"] == "bfloat16" else None,
        clip=training.max_grad_norm,
        decay=training.weight_decay,
        rate=lambda step: learning_rate(step, plan["max_steps"], training),
        betas=(training.adam_beta1, training.adam_beta2),
        eps=training.adam_epsilon,
    ):
        losses.append(total.item())
        seconds.append(time.perf_counter() - began)
        began = time.perf_counter()
    result = {"losses": losses, "step_seconds": seconds, "tokens_per_step": plan["tokens_per_step"]}
    Path(out).write_text(json.dumps(result), encoding="utf-8")


def learning_rate(step: int, steps: int, training: Any) -> float:
    """Return the learning rate of a step, counted from 0, by the formulas of llm.c."""
    peak, warmup, end = training.learning_rate, training.warmup_steps, training.final_learning_rate_fraction
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * (end + (1 - end) * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup))))


def micro_batches(rows: Any, training: Any, *, rows_per_step: int, size: int) -> Iterator[dict[str, Tensor]]:
    """Yield micro-batches of token ids, shape [size, T], endlessly in the run's order."""
    from gpt2_repro.data.batching import EpochSampler, collate_rows

    seed = training.seed if training.data_seed is None else training.data_seed
    shuffle = training.train_sampling_strategy == "random"
    sampler = EpochSampler(len(rows), rows_per_step=rows_per_step, seed=seed, shuffle=shuffle)
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        order = list(sampler)
        for first in range(0, len(order), size):
            picked = rows[order[first : first + size]]["input_ids"]
            batch = collate_rows([{"input_ids": row} for row in picked])
            del batch["labels"]
            pinned = torch.cuda.is_available()
            yield {name: tensor.pin_memory() if pinned else tensor for name, tensor in batch.items()}


if __name__ == "__main__":
    commands: dict[str, Callable[..., None]] = {"start": start, "stock": stock, "bare": bare}
    commands[sys.argv[1]](*sys.argv[2:])

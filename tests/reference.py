"""Compute and train GPT-2 in plain PyTorch, without the code of this project or of transformers."""

import json
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F


def gelu(x: Tensor) -> Tensor:
    """Return GPT-2's approximation of the GELU."""
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def logits(weights: dict[str, Tensor], ids: Tensor, heads: int, gelu: Callable[[Tensor], Tensor] = gelu) -> Tensor:
    """Return the logits of GPT-2 for token ids of shape [rows, length].

    The weights have the names of Hugging Face, which stores the matrices as [in, out].
    """

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ weights[f"transformer.{name}.weight"] + weights[f"transformer.{name}.bias"]

    def norm(x: Tensor, name: str) -> Tensor:
        gain, bias = weights[f"transformer.{name}.weight"], weights[f"transformer.{name}.bias"]
        return (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + 1e-5).sqrt() * gain + bias

    rows, length = ids.shape
    x = weights["transformer.wte.weight"][ids] + weights["transformer.wpe.weight"][:length]
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    for block in (f"h.{layer}" for layer in range(sum(name.endswith(".ln_1.bias") for name in weights))):
        parts = linear(norm(x, f"{block}.ln_1"), f"{block}.attn.c_attn").chunk(3, dim=2)
        q, k, v = (part.view(rows, length, heads, -1).transpose(1, 2) for part in parts)
        scores = (q @ k.transpose(2, 3)) / math.sqrt(q.shape[3])
        mixed = scores.masked_fill(future, -math.inf).softmax(dim=3) @ v
        x = x + linear(mixed.transpose(1, 2).reshape(x.shape), f"{block}.attn.c_proj")
        h = gelu(linear(norm(x, f"{block}.ln_2"), f"{block}.mlp.c_fc"))
        x = x + linear(h, f"{block}.mlp.c_proj")
    return norm(x, "ln_f") @ weights["transformer.wte.weight"].T


def train(
    weights: dict[str, Tensor], rows: Tensor, *, heads: int, peak: float, warmup: int, clip: float, decay: float
) -> Iterator[dict[str, float]]:
    """Train on the rows in order; yield each step's loss, grad_norm and learning_rate.

    The weights are changed in place.

    Args:
        rows: token ids of shape [steps, rows per step, T + 1].
        peak: highest learning rate.
        clip: limit of the gradient norm.
        decay: weight decay of the matrices.
    """
    parameters = [weight.requires_grad_() for weight in weights.values()]
    matrices, vectors = ([p for p in parameters if (p.dim() >= 2) == wide] for wide in (True, False))
    groups = [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.95), eps=1e-8)
    steps = len(rows)
    for step, batch in enumerate(rows):
        cosine = 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))
        rate = peak * (step + 1) / warmup if step < warmup else peak * cosine
        loss = F.cross_entropy(logits(weights, batch[:, :-1], heads).flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        norm = torch.stack([weight.grad.double().norm() for weight in parameters]).norm()
        nn.utils.clip_grads_with_norm_(parameters, clip, norm)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
        yield {"loss": loss.item(), "grad_norm": norm.item(), "learning_rate": rate}


def write_llmc_shard(path: Path, ids: np.ndarray) -> Path:
    """Write token ids to a data file in the format of llm.c's dev/data/data_common.py."""
    path.write_bytes(np.array([20240520, 1, len(ids), *[0] * 253], "<i4").tobytes() + ids.astype("<u2").tobytes())
    return path


def encode_each(encoder: Any, texts: list[str]) -> list[np.ndarray]:
    """Return one array of token ids per text.

    Each array includes the separator if the encoder adds one.
    """
    ids, lengths = encoder.encode(texts)
    return np.split(ids, np.cumsum(lengths))[:-1]


def write_jsonl(path: Path, texts: Iterable[str]) -> str:
    """Write texts to a .jsonl file, and return its path."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return str(path)

"""Build and train GPT-2 in plain PyTorch, without the code of this project."""

import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width, eps=1e-5), nn.LayerNorm(width, eps=1e-5)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = (
            part.view(rows, length, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.norm_1(x)).split(width, dim=2)
        )
        scores = (q @ k.transpose(2, 3)) / math.sqrt(width // self.heads)
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        mixed = scores.masked_fill(future, -math.inf).softmax(dim=3) @ v
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        h = self.up(self.norm_2(x))
        h = 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
        return x + self.down(h)


class GPT2(nn.Module):
    def __init__(self, *, layers: int, heads: int, width: int, window: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(window, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width, eps=1e-5)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.tokens.weight.T

    def load(self, weights: dict[str, Tensor]) -> None:
        """Load the weights of a Hugging Face GPT-2."""
        parts = {"ln_1": "norm_1", "ln_2": "norm_2", "attn.c_attn": "qkv", "attn.c_proj": "out"}
        parts |= {"mlp.c_fc": "up", "mlp.c_proj": "down"}
        names = {"transformer.wte.weight": "tokens.weight", "transformer.wpe.weight": "positions.weight"}
        names |= {f"transformer.ln_f.{kind}": f"norm.{kind}" for kind in ("weight", "bias")}
        for layer in range(len(self.blocks)):
            for theirs, ours in parts.items():
                for kind in ("weight", "bias"):
                    names[f"transformer.h.{layer}.{theirs}.{kind}"] = f"blocks.{layer}.{ours}.{kind}"
        # Hugging Face stores the matrices as [in, out], and nn.Linear as [out, in].
        turned = {
            names[name]: weight.T if ".c_" in name and name.endswith("weight") else weight
            for name, weight in weights.items()
            if name != "lm_head.weight"
        }
        self.load_state_dict(turned)


def train(
    model: GPT2, rows: Tensor, *, steps: int, rows_per_step: int, peak: float, warmup: int, clip: float, decay: float
) -> Iterator[dict[str, float]]:
    """Train on the rows in order; yield each step's loss, grad_norm and learning_rate.

    Args:
        rows: token ids of shape [n, T + 1].
        peak: highest learning rate.
        clip: limit of the gradient norm.
        decay: weight decay of the matrices.
    """
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.95), eps=1e-8)
    for step in range(steps):
        cosine = 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))
        rate = peak * (step + 1) / warmup if step < warmup else peak * cosine
        batch = rows[step * rows_per_step : (step + 1) * rows_per_step]
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        weights = list(model.parameters())
        norm = torch.stack([weight.grad.double().norm() for weight in weights]).norm()
        nn.utils.clip_grads_with_norm_(weights, clip, norm)
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

"""Compute reference losses with transformers alone, row by row, summed in fp64."""

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from datasets import load_from_disk
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, set_seed

from gpt2_repro.data.batching import EpochSampler


def rows_of(folder: Path, split: str) -> list[Tensor]:
    """Return the token ids of each row in a split of a prepared folder."""
    return [torch.tensor(row) for row in load_from_disk(str(folder / split))["input_ids"][:]]


def order_of(rows: list[Tensor], rows_per_step: int, epoch: int) -> list[int]:
    """Return the order of the rows of an epoch. Rows that do not fill a step are missing."""
    sampler = EpochSampler(len(rows), rows_per_step=rows_per_step, seed=42, shuffle=True)
    sampler.set_epoch(epoch)
    return list(sampler)


def targets_of(rows: list[Tensor]) -> int:
    return sum(len(row) - 1 for row in rows)


def untrained(run: Path) -> PreTrainedModel:
    """Return a model with the same initial weights as a run."""
    config = AutoConfig.from_pretrained(next(run.glob("checkpoint-*")))
    set_seed(json.loads((run / "environment.json").read_text(encoding="utf-8"))["seed"])
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@torch.no_grad()
def nll(model: PreTrainedModel, row: Tensor, vocabulary: int = 300, begin: int = 0) -> float:
    """Return the sum of the negative log-likelihoods of all targets of a row.

    Args:
        vocabulary: number of logits to use; the rest is vocabulary padding.
        begin: position id of the first token of the row.
    """
    positions = torch.arange(begin, begin + len(row) - 1)[None]
    logits = model(row[None, :-1], position_ids=positions).logits[0, :, :vocabulary].double()
    return F.cross_entropy(logits, row[1:], reduction="sum").item()


def mean_nll(model: PreTrainedModel, rows: list[Tensor]) -> float:
    return sum(nll(model, row) for row in rows) / targets_of(rows)

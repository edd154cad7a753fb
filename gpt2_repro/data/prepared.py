"""Open a prepared folder for training."""

from pathlib import Path
from typing import Any

from datasets import Dataset, load_from_disk

from gpt2_repro.errors import UserError


def open_split(dataset_dir: str, split: str, manifest: dict[str, Any]) -> Dataset:
    """The rows of a split, in numpy form. Raises UserError where their number is not the manifest's."""
    rows = load_from_disk(str(Path(dataset_dir, split))).with_format("numpy")
    expected = manifest["counts"][split]["rows"]
    if len(rows) != expected:
        raise UserError(
            f"{dataset_dir}/{split} has {len(rows):,} rows and its manifest says {expected:,}: prepare it anew"
        )
    return rows


def open_splits(
    dataset_dir: str, manifest: dict[str, Any], *, eval_tokens: int, sequence_length: int
) -> tuple[Dataset, Dataset]:
    """The training rows and the first validation rows that make `eval_tokens` targets; 0 tokens takes them all.

    Raises UserError where the validation split has fewer.
    """
    validation = open_split(dataset_dir, "validation", manifest)
    wanted = -(-eval_tokens // sequence_length) if eval_tokens else len(validation)
    if wanted > len(validation):
        available = len(validation) * sequence_length
        raise UserError(
            f"the validation split of {dataset_dir} has {available:,} tokens and eval_tokens asks for {eval_tokens:,}: "
            f"use --eval_tokens {available} or hold out more when preparing"
        )
    return open_split(dataset_dir, "train", manifest), validation.select(range(wanted))

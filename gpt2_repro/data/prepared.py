"""Open a prepared folder for training."""

from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from gpt2_repro.data.arguments import DataArguments
from gpt2_repro.data.rows import Rows, open_rows
from gpt2_repro.errors import UserError


def open_split(dataset_dir: str, split: str, manifest: dict[str, Any]) -> Rows:
    """The rows of a split. Raises UserError where their number is not the manifest's."""
    rows = open_rows(Path(dataset_dir, split))
    expected = manifest["counts"][split]["rows"]
    if len(rows) != expected:
        raise UserError(
            f"{dataset_dir}/{split} has {len(rows):,} rows and its manifest says {expected:,}: prepare it anew"
        )
    return rows


def open_dataset(
    args: DataArguments, manifest: dict[str, Any], *, eval_tokens: int
) -> tuple[Rows, Rows, PreTrainedTokenizerBase]:
    """The training rows, the first validation rows that make `eval_tokens` targets (0 takes them all), the tokenizer.

    Raises UserError where the validation split has fewer.
    """
    validation = open_split(args.dataset_dir, "validation", manifest)
    if eval_tokens:
        targets = np.cumsum(validation.lengths() - 1)
        if eval_tokens > targets[-1]:
            raise UserError(
                f"the validation split of {args.dataset_dir} has {targets[-1]:,} tokens and eval_tokens asks for "
                f"{eval_tokens:,}: use --eval_tokens {targets[-1]} or hold out more when preparing"
            )
        validation = validation.first(int(np.searchsorted(targets, eval_tokens)) + 1)
    tokenizer = AutoTokenizer.from_pretrained(str(Path(args.dataset_dir, "tokenizer")))
    return open_split(args.dataset_dir, "train", manifest), validation, tokenizer

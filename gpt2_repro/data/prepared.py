"""Open a prepared folder for training."""

from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from gpt2_repro.data.arguments import DataArguments
from gpt2_repro.data.locks import reading_lock
from gpt2_repro.data.rows import Rows, open_rows
from gpt2_repro.data.shards import check_shards
from gpt2_repro.errors import UserError


FURTHER = "validation_"  # a further validation set is the split of this and its name


def open_split(dataset_dir: str, split: str, manifest: dict[str, Any]) -> Rows:
    """The rows of a split. Raises UserError where its files or the number of rows are not the manifest's."""
    check_shards(dataset_dir, split, manifest)
    rows = open_rows(Path(dataset_dir, split))
    expected = manifest["counts"][split]["rows"]
    if len(rows) != expected:
        raise UserError(f"{dataset_dir}/{split} has {len(rows):,} rows, its manifest {expected:,}: prepare it again")
    return rows


def open_validation(dataset_dir: str, manifest: dict[str, Any]) -> dict[str, Rows]:
    """The rows of each validation set by its name; the main one has the name ""."""
    sets = {"": open_split(dataset_dir, "validation", manifest)}
    for split, counts in manifest["counts"].items():
        if split.startswith(FURTHER) and counts["rows"]:
            sets[split.removeprefix(FURTHER)] = open_split(dataset_dir, split, manifest)
    return sets


def open_dataset(
    args: DataArguments, manifest: dict[str, Any], *, eval_tokens: int
) -> tuple[Rows, dict[str, Rows], PreTrainedTokenizerBase]:
    """The training rows, the rows of each validation set by its name, the tokenizer.

    Of a set the first rows that make `eval_tokens` targets, or all where that is 0. The main set, `validation/`, has the
    name "" and raises UserError where it has fewer; a further one, `validation_<name>/`, is then taken whole. Until the
    process ends, the folder cannot be replaced.
    """
    reading_lock(Path(args.dataset_dir))
    sets = open_validation(args.dataset_dir, manifest)
    if eval_tokens > (targets := int((sets[""].lengths() - 1).sum())):
        raise UserError(
            f"{args.dataset_dir} holds out {targets:,} and eval_tokens asks for {eval_tokens:,}: pass --eval_tokens {targets}"
        )
    cut = {name: _first_targets(rows, eval_tokens) for name, rows in sets.items()}
    tokenizer = AutoTokenizer.from_pretrained(str(Path(args.dataset_dir, "tokenizer")))
    return open_split(args.dataset_dir, "train", manifest), cut, tokenizer


def _first_targets(rows: Rows, tokens: int) -> Rows:
    """The first rows that make `tokens` targets; all where there are fewer, or `tokens` is 0."""
    targets = np.cumsum(rows.lengths() - 1)
    return rows.first(int(np.searchsorted(targets, tokens)) + 1) if 0 < tokens <= targets[-1] else rows

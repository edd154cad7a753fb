"""Open a prepared folder for training."""

from pathlib import Path
from typing import Any

from datasets import Dataset, load_from_disk
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from gpt2_repro.data.arguments import DataArguments
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


def open_dataset(
    args: DataArguments, manifest: dict[str, Any], *, eval_tokens: int
) -> tuple[Dataset, Dataset, PreTrainedTokenizerBase]:
    """The training rows, the first validation rows that make `eval_tokens` targets (0 takes them all), the tokenizer.

    Raises UserError where the validation split has fewer.
    """
    validation = open_split(args.dataset_dir, "validation", manifest)
    wanted = -(-eval_tokens // args.sequence_length) if eval_tokens else len(validation)
    if wanted > len(validation):
        available = len(validation) * args.sequence_length
        raise UserError(
            f"the validation split of {args.dataset_dir} has {available:,} tokens and eval_tokens asks for "
            f"{eval_tokens:,}: use --eval_tokens {available} or hold out more when preparing"
        )
    tokenizer = AutoTokenizer.from_pretrained(str(Path(args.dataset_dir, "tokenizer")))
    return open_split(args.dataset_dir, "train", manifest), validation.select(range(wanted)), tokenizer

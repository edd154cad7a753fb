"""Prepare data: text -> tokens -> rows on disk, with a manifest. Needs no GPU and imports no torch.

python prepare_data.py                                   the recipe gpt2_124m: FineWeb 10BT from the Hub
python prepare_data.py recipes/demo.yaml                 Python's own documentation, a minute
python prepare_data.py --data_files 'books/*.txt' --dataset_dir data/books --validation_tokens 1e6
"""

import os
from pathlib import Path
from typing import Any

from gpt2_repro import entry
from gpt2_repro.data.arguments import DataArguments
from gpt2_repro.data.prepare import prepare
from gpt2_repro.data.rows import verify
from gpt2_repro.data.sources import SOURCES
from gpt2_repro.errors import UserError
from gpt2_repro.recipe import parse_recipe


EXTRAS: dict[str, dict[str, Any]] = {
    "num_proc": {"type": int, "default": os.cpu_count() or 1, "help": "Worker processes, each on one file."},
    "verify": {"action": "store_true", "help": "Read the finished folder again and compare it with its manifest."},
    "list_sources": {"action": "store_true", "help": "Print the sources and stop."},
}


def main(argv: list[str]) -> None:
    """Parse, prepare, print what the folder holds."""
    recipe = parse_recipe(argv, sections={"data": DataArguments}, description=__doc__, extras=EXTRAS)
    if recipe.extras.list_sources:
        for name, about in SOURCES.items():
            print(f"{name:18} {about}")
        return
    args = DataArguments(**recipe.values["data"])
    if recipe.extras.num_proc < 1:
        raise UserError("--num_proc must be at least 1")
    manifest = prepare(args, num_proc=recipe.extras.num_proc)
    if recipe.extras.verify:
        verify(args.dataset_dir, manifest)
        print(f"{args.dataset_dir}: every row is what its manifest says")

    for split, counts in manifest["counts"].items():
        print(
            f"{Path(args.dataset_dir, split)}: {counts['documents']:,} documents, {counts['tokens']:,} tokens, "
            f"{counts['rows']:,} rows, {counts['dropped_tokens']:,} tokens left over"
        )
    if losses := manifest.get("reference_losses"):
        print(f"to beat, nats per token: unigram {losses['unigram']:.3f}, interpolated bigram {losses['bigram']:.3f}")


if __name__ == "__main__":
    entry.run(main)

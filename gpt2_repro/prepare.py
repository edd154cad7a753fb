"""Tokenize text, and write token ids and a manifest to a folder.

The manifest has the settings, token counts and file hashes. No GPU is needed. Examples:

python prepare_data.py                                      FineWeb 10BT from the Hub, for recipes/gpt2_124m.yaml
python prepare_data.py recipes/own_text.yaml --data_files shakespeare.txt      your own text, into data/shakespeare
python prepare_data.py recipes/demo.yaml                    Python's documentation, without a network connection
python prepare_data.py --list_sources                       all named sources, with download sizes and preparation times
python prepare_data.py --verify --dataset_dir data/books    compare a copied folder with its manifest
"""

import dataclasses
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpt2_repro import cli
from gpt2_repro.data.arguments import PreparationOptions, name_folder
from gpt2_repro.data.preparation.prepare import prepare
from gpt2_repro.data.prepared import PreparedData
from gpt2_repro.data.sources.local_files import MOST_SOURCES
from gpt2_repro.data.sources.presets import table
from gpt2_repro.errors import UserError
from gpt2_repro.hardware import cpu_cores
from gpt2_repro.launchers import PREPARE, training_command
from gpt2_repro.manifest import MixedSource, RowForm
from gpt2_repro.tokenization import PROBE, encode


if TYPE_CHECKING:
    from gpt2_repro.data.recipe import DataRecipe

OPTIONS: dict[str, dict[str, Any]] = {
    "list_sources": {"action": "store_true", "help": "Print all sources with sizes and preparation times, then exit."},
    "verify": {"action": "store_true", "help": "Compare all files of --dataset_dir with its manifest, then exit."},
}
for field in dataclasses.fields(PreparationOptions):
    OPTIONS[field.name] = {"default": field.default, **field.metadata}
OPTIONS["num_proc"]["default"] = cpu_cores()


FEW_DOCUMENTS = 10  # in a validation split, whose loss then depends on which documents were chosen


def main(argv: list[str]) -> Path:
    """Prepare a folder, verify it, or print the list of sources. Return the folder."""
    # Imported here because every worker process imports this file, and gpt2_repro.config imports transformers.
    from gpt2_repro.config import parse_recipe
    from gpt2_repro.data.recipe import DataRecipe

    recipe = parse_recipe(DataRecipe, argv, description=__doc__, options=OPTIONS)
    if {"source", "data_files"} <= recipe.typed and recipe.data.source != "files":
        raise UserError("--source and --data_files both set the text. Pass only one of them.")
    if "validation_fraction" in recipe.typed and recipe.data.split != "hash":
        raise UserError("--validation_fraction needs --split hash.")
    args = name_folder(recipe.data, recipe.typed)
    options = recipe.options
    if options.list_sources:
        print(table(options.num_proc))
        return Path(args.dataset_dir)
    if options.verify:
        if not args.dataset_dir:
            raise UserError("Nothing to verify. Pass the prepared folder as --dataset_dir.")
        PreparedData.read(args.dataset_dir, command=f"{PREPARE} RECIPE").verify()
        print(f"{args.dataset_dir}: every file matches the manifest")
        return Path(args.dataset_dir)
    preparation = PreparationOptions(
        num_proc=options.num_proc,
        encoder=options.encoder,
        max_bad_documents=options.max_bad_documents,
        keep_downloads=options.keep_downloads,
        overwrite=options.overwrite,
    )
    data = prepare(args, preparation)
    describe(data, max_tokens=args.max_tokens)
    print(f"Train on this data with:\n{shlex.join(_training_command(recipe, data))}")
    return data.path


def _training_command(recipe: "DataRecipe", data: PreparedData) -> list[str]:
    """Return the command that trains on a prepared folder."""
    from gpt2_repro.config import DEFAULT

    path = recipe.path
    options: dict[str, Any] = {}
    is_folder_of_recipe = str(data.path) == recipe.written.get("data", {}).get("dataset_dir")
    if recipe.typed or not is_folder_of_recipe:
        options["dataset_dir"] = data.path
    if recipe.written.get("training", {}).get("hellaswag_steps"):
        try:
            encode(data.tokenizer, [PROBE])
        except UserError:  # the ids of some characters, or of no text
            if path == DEFAULT:
                path = Path("recipes/own_text.yaml")
            options["hellaswag_steps"] = 0
    for field in dataclasses.fields(RowForm):
        if field.name in recipe.typed or path != recipe.path:
            options[field.name] = getattr(recipe.data, field.name)
    on_gpu = any(Path(device).exists() for device in ("/dev/nvidia0", "/dev/kfd"))  # NVIDIA, AMD
    return [*training_command(on_gpu=on_gpu), str(path), *cli.words_of(options)]


def describe(data: PreparedData, *, max_tokens: int) -> None:
    """Print how many documents, tokens and rows a prepared folder has.

    If the training split exceeds `max_tokens` (0: no limit) by more than 10 %, a note is printed.
    """
    manifest = data.manifest
    for split, counts in manifest.counts.items():
        empty = ""
        if counts.empty_documents:
            empty = f" (not counting {counts.empty_documents:,} empty documents)"
        text = f"{counts.documents:,} documents{empty}, {counts.tokens:,} tokens, {counts.rows:,} rows"
        print(f"{data.path / split}: {text}, {counts.dropped_tokens:,} tokens dropped (too few for a row)")
        if split == "train" and manifest.mixture is not None:
            describe_mixture(manifest.mixture)
        else:
            describe_sources(manifest.tokens_by_source[split])
    held_out = manifest.counts["validation"].documents
    if manifest.request["split"] == "hash" and held_out < FEW_DOCUMENTS:
        total = held_out + manifest.counts["train"].documents
        fraction = manifest.request["validation_fraction"]
        fix = f"To hold out more, pass a --validation_fraction above {fraction}, and another --dataset_dir."
        print(f"Only {held_out} of {total:,} documents are in the validation split: its loss says little. {fix}")
    if max_tokens and manifest.counts["train"].tokens > 1.1 * max_tokens:
        print(f"The train split has more tokens than --max_tokens {max_tokens}, because documents are not cut.")
    bad = manifest.read.bad_documents
    if bad:
        print(f"skipped {bad:,} files or rows without readable text. The first: {manifest.read.bad_examples[0]}")
    if manifest.read.front_matter:
        note = "is left out. To train it as text, pass --front_matter keep."
        print(f"the front matter of {manifest.read.front_matter:,} Markdown files {note}")
    losses = manifest.reference_losses
    if losses is not None:
        models = f"unigram {losses['unigram']:.3f}, interpolated bigram {losses['bigram']:.3f}"
        print(f"validation loss to beat, in nats per token: {models}")


def describe_mixture(mixture: list[MixedSource]) -> None:
    """Print the tokens of each source of a mixture in the training split."""
    total = sum(mixed.used for mixed in mixture)
    for mixed in mixture:
        share = f"{mixed.used / total:.2%}, requested {mixed.share:.2%}"
        unused = "not read to its end"
        if mixed.available is not None:
            rest = max(0, mixed.available - mixed.used)
            passes = mixed.used / mixed.available
            unused = f"{passes:.2f} passes, {rest:,} tokens of the source unused"
        print(f"    {mixed.source}: {mixed.used:,} tokens ({share}); {unused}")
    targets = [mixed.row_tokens for mixed in mixture if mixed.row_tokens is not None]
    if targets:
        shares = ", ".join(f"{number / max(1, sum(targets)):.2%}" for number in targets)
        print(f"    shares of the targets in the rows: {shares}")


def describe_sources(tokens: dict[str, int]) -> None:
    """Print the tokens of each source of a split, if there are several. The largest ones come first."""
    if len(tokens) < 2:
        return
    total = max(1, sum(tokens.values()))
    ordered = sorted(tokens.items(), key=lambda item: -item[1])
    for source, number in ordered[:MOST_SOURCES]:
        print(f"    {source}: {number:,} tokens ({number / total:.1%})")
    if len(ordered) > MOST_SOURCES:
        print(f"    and {len(ordered) - MOST_SOURCES} more sources, see manifest.json")


if __name__ == "__main__":
    cli.run(main, prints_results=False)

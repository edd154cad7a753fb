"""What a prepared folder says of itself, and whether it fits a recipe."""

import dataclasses
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from gpt2_repro.data.arguments import DataArguments
from gpt2_repro.errors import UserError
from gpt2_repro.files import read_object


MANIFEST = "manifest.json"


def form_of(args: DataArguments) -> dict[str, Any]:
    """What decides the form of a row."""
    return {name: getattr(args, name) for name in ("packing", "sequence_length", "min_length", "separator")}


def request_of(args: DataArguments) -> dict[str, Any]:
    """Everything that decides the content of a prepared folder: all of the section but the folder's own name."""
    request = {k: v for k, v in dataclasses.asdict(args).items() if k not in ("dataset_dir", "source")}
    return {"source": "files" if args.data_files else args.source, **request}


def first_difference(recorded: dict[str, Any], asked: dict[str, Any]) -> tuple[str, Any, Any] | None:
    """The first key of `asked` that was recorded with another value, that value and the one asked for; None if none.

    What a folder does not record came later, and is the default there.
    """
    recorded = {k: v for k, v in dataclasses.asdict(DataArguments()).items() if k not in recorded} | recorded
    # Through JSON, as the recorded ones went.
    for key, value in json.loads(json.dumps(asked)).items():
        if recorded.get(key) != value:
            return key, recorded.get(key), value
    return None


def read_manifest(dataset_dir: str, *, prepare: str) -> dict[str, Any]:
    """The manifest of a finished folder. `prepare` is the command that makes one, for the message.

    Raises UserError where there is no folder or it is not finished.
    """
    path = Path(dataset_dir, MANIFEST)
    if not path.is_file():
        what = (
            f"{dataset_dir} is not a prepared folder" if Path(dataset_dir).exists() else f"there is no {dataset_dir}"
        )
        raise UserError(f"{what}: prepare the data first with `{prepare}`")
    manifest = read_object(path)
    if not {"request", "shards"} <= manifest.keys():
        raise UserError(f"{path} is damaged. Move {dataset_dir} away and prepare it again with `{prepare}`.")
    return manifest


def not_prepared(folder: Path) -> str:
    """Return the error message for a folder that exists and was not made by prepare_data.py."""
    return f"{folder / MANIFEST} is missing or damaged. Move the folder away or pass another --dataset_dir."


def open_manifest(args: DataArguments, *, typed: Collection[str], recipe: Path) -> dict[str, Any]:
    """Return the manifest of the section's folder. Raises UserError if it is missing or was prepared differently.

    If the folder was typed on the command line, any source is accepted; only the form of its rows has to fit.

    Args:
        typed: names of the fields that were typed on the command line.
        recipe: its file, for the message.
    """
    folder = f" --dataset_dir {args.dataset_dir}" if "dataset_dir" in typed else ""
    manifest = read_manifest(args.dataset_dir, prepare=f"python prepare_data.py {recipe}{folder}")
    asked = form_of(args) if "dataset_dir" in typed else request_of(args)
    if difference := first_difference(manifest["request"], asked):
        key, holds, value = difference
        option = f" --{key} {value}" if key in typed else ""
        raise UserError(
            f"{args.dataset_dir} was prepared with {key} {holds} and the recipe asks for {value}: use --{key} {holds} "
            f"or prepare it with `python prepare_data.py {recipe}{option}` and another --dataset_dir"
        )
    return manifest

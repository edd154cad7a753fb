"""What a prepared folder says of itself, and whether it fits a recipe."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from gpt2_repro.data.arguments import DataArguments
from gpt2_repro.data.sources import source_name
from gpt2_repro.errors import UserError


MANIFEST = "manifest.json"


def form_of(args: DataArguments) -> dict[str, Any]:
    """What decides the rows besides the source and its tokenizer."""
    return {"packing": "concat", "sequence_length": args.sequence_length, "separator": args.separator}


def request_of(args: DataArguments) -> dict[str, Any]:
    """Everything that decides the content of a prepared folder: all of the section but the folder's own name."""
    request = {k: v for k, v in dataclasses.asdict(args).items() if k not in ("dataset_dir", "source")}
    return {"source": source_name(args), "packing": "concat", **request}


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
    return json.loads(path.read_text())


def check_manifest(manifest: dict[str, Any], args: DataArguments, *, folder_typed: bool, prepare: str) -> None:
    """Refuse data whose form, source or tokenizer is not what the recipe asks for.

    A folder that the user typed is the data, whatever its source and tokenizer; its form has to fit all the same.
    """
    asked = form_of(args)
    if not folder_typed:
        asked |= {"source": source_name(args), "tokenizer": args.tokenizer}
    holds = {key: manifest["request"][key] for key in asked}
    for key, value in asked.items():
        if holds[key] != value:
            raise UserError(
                f"{args.dataset_dir} was prepared with {key} {holds[key]} and the recipe asks for {value}: use "
                f"--{key} {holds[key]} or prepare it with `{prepare}` and another --dataset_dir"
            )

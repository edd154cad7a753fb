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
    """What decides the form of a row."""
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
    try:
        return json.loads(path.read_text())
    except ValueError:
        raise UserError(f"{path} is damaged: move {dataset_dir} away and prepare it anew with `{prepare}`") from None


def check_manifest(manifest: dict[str, Any], args: DataArguments, *, folder_typed: bool, prepare: str) -> None:
    """Refuse data that was prepared otherwise than the recipe asks.

    A folder that the user typed is the data, wherever it comes from; only the form of its rows has to fit.
    """
    asked = json.loads(json.dumps(form_of(args) if folder_typed else request_of(args)))
    for key, value in asked.items():
        holds = manifest["request"].get(key)
        if holds != value:
            raise UserError(
                f"{args.dataset_dir} was prepared with {key} {holds} and the recipe asks for {value}: use "
                f"--{key} {holds} or prepare it with `{prepare}` and another --dataset_dir"
            )

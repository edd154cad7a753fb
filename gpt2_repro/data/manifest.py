"""What a prepared folder says of itself, and whether it fits a recipe."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpt2_repro.data.arguments import DataArguments
from gpt2_repro.errors import UserError
from gpt2_repro.files import read_object


if TYPE_CHECKING:
    from gpt2_repro.recipe import ParsedRecipe


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


def require_prepared(argv: Sequence[str]) -> None:
    """Raise UserError where the data of train.py's command line is missing, before anything slow is imported.

    It is the first mistake of all, and on a machine with few cores eight processes import torch for half a minute.
    """
    from gpt2_repro.recipe import parse_recipe

    if not {"-h", "--help", "--dry_run", "--diff_recipe"} & {word.split("=")[0] for word in argv}:
        recipe = parse_recipe(argv, sections={"data": DataArguments}, leave_others=True)
        read_manifest(recipe.values["data"]["dataset_dir"], prepare=_prepare_command(recipe))


def open_manifest(recipe: "ParsedRecipe") -> dict[str, Any]:
    """The manifest of the recipe's folder. Raises UserError where it is missing or was prepared otherwise.

    A folder that the user typed is the data, wherever it comes from; only the form of its rows has to fit.
    """
    args = DataArguments(**recipe.values["data"])
    manifest = read_manifest(args.dataset_dir, prepare=_prepare_command(recipe))
    typed = "dataset_dir" in recipe.typed
    if difference := first_difference(manifest["request"], form_of(args) if typed else request_of(args)):
        key, holds, value = difference
        option = f" --{key} {value}" if key in recipe.typed else ""
        raise UserError(
            f"{args.dataset_dir} was prepared with {key} {holds} and the recipe asks for {value}: use --{key} {holds} "
            f"or prepare it with `python prepare_data.py {recipe.path}{option}` and another --dataset_dir"
        )
    return manifest


def _prepare_command(recipe: "ParsedRecipe") -> str:
    typed = f" --dataset_dir {recipe.values['data']['dataset_dir']}" if "dataset_dir" in recipe.typed else ""
    return f"python prepare_data.py {recipe.path}{typed}"

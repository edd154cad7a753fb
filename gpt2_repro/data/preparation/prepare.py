"""Build a prepared folder in a temporary folder, then move it to the final path."""

import contextlib
import errno
import glob
import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpt2_repro.data.arguments import DataArguments, PreparationOptions, default_folder
from gpt2_repro.data.preparation.build import REQUEST, build_folder, check_request
from gpt2_repro.data.prepared import PreparedData, exclusive_lock, first_difference, request_of
from gpt2_repro.data.sources.opening import SourceOpener
from gpt2_repro.errors import UserError
from gpt2_repro.files import read_object, remove_folder, write_whole
from gpt2_repro.manifest import MANIFEST, SPLITS


logger = logging.getLogger(__name__)

PUBLISHED = "published.json"  # new name of REQUEST after the prepared folder is complete: nothing to resume


def prepare(args: DataArguments, options: PreparationOptions | None = None) -> PreparedData:
    """Prepare the folder `args.dataset_dir` and return it.

    A folder that was already prepared with the same arguments is returned unchanged. An interrupted preparation is
    resumed from the folder `<dataset_dir>.staging`, if the arguments are the same.

    Raises UserError if the source is unknown, the text or a split is empty, or the disk is full. Also raises UserError
    if the folder was prepared with other arguments, was not made by prepare_data.py, or cannot be locked for writing.
    """
    options = options or PreparationOptions()
    target = Path(args.dataset_dir)
    if target.is_symlink():
        target = target.resolve()  # otherwise the finished folder would replace the link
    request = request_of(args)
    if args.source == "files" and not args.data_files:
        raise UserError("No text was passed. Pass --data_files with your files, folders or globs.")
    if not target.name:
        raise UserError(f"--dataset_dir {args.dataset_dir} has no folder name. Pass a folder such as data/books.")
    if outer := next((parent for parent in target.resolve().parents if (parent / SPLITS).is_file()), None):
        raise UserError(f"--dataset_dir {target} is inside the prepared folder {outer}. Pass another folder.")
    exists = target.exists() and not (target.is_dir() and not any(target.iterdir()))  # an empty folder may be used
    if exists and "request" not in read_object(target / MANIFEST):
        fix = f"Pass another folder, such as --dataset_dir {default_folder(args) or 'data/books'}."
        if default_folder(args) == str(target):
            fix = "Move or delete it, or pass another --dataset_dir."
        raise UserError(f"{target} exists, but it is not a complete prepared folder. {fix}")
    staging = target.with_name(target.name + ".staging")
    if exists and not options.overwrite:
        data = PreparedData.read(target)
        if difference := first_difference(data.manifest.request, request):
            key, holds, value = difference
            if key == "data_files":
                SourceOpener(args, staging, keep_downloads=False, revisions={}).open_all()  # raises for wrong files
            fix = "Pass --overwrite to replace it, or another --dataset_dir."
            found = f"`--{key} {holds or 'none'}`, not with `--{key} {value or 'none'}`"
            raise UserError(f"{target} was prepared with {found}. {fix}")
        for split in data.manifest.shards:
            data.check_shards(split)
        data.check_tokenizer()
        logger.info("%s is already prepared with these options", target)
        _warn_of_changes(data, args)
        _clear_away(target, staging)
        return data
    with _replacement_lock(target), _staging_lock(staging):
        _claim(staging, request)
        try:
            if not (staging / "folder" / MANIFEST).is_file():
                build_folder(target, staging, args, options)
            check_request(staging, read_object(staging / "folder" / MANIFEST)["request"], args)
            if (staging / REQUEST).is_file():
                (staging / REQUEST).replace(staging / PUBLISHED)
            _publish(staging / "folder", target)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise UserError(f"The disk of {target} is full. Free some space and run the same command again.") from None
        remove_folder(staging, PUBLISHED)
    return PreparedData.read(target)


@contextlib.contextmanager
def _replacement_lock(target: Path) -> Iterator[None]:
    """Lock a prepared folder that will be replaced."""
    if not target.exists():
        yield
        return
    with exclusive_lock(target, f"A training run reads {target}. Wait until it ends or pass another --dataset_dir."):
        yield


@contextlib.contextmanager
def _staging_lock(staging: Path) -> Iterator[None]:
    """Create the staging folder and lock it for this process."""
    try:
        staging.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{staging} cannot be created ({error.strerror}). Pass another --dataset_dir.") from None
    with exclusive_lock(staging, f"Another process is preparing {staging.with_suffix('')}. Wait for it or stop it."):
        yield


def _claim(staging: Path, request: dict[str, Any]) -> None:
    """Record the options of a preparation in its staging folder.

    Raises UserError if the folder has files that prepare_data.py did not make.
    """
    found = sorted(path.name for path in staging.iterdir() if not path.name.startswith(f".{REQUEST}."))
    markers = (staging / REQUEST, staging / PUBLISHED, staging / "folder" / MANIFEST)
    if not found:
        write_whole(staging / REQUEST, json.dumps({"request": request}))
    elif not any("request" in read_object(marker) for marker in markers):
        raise UserError(f"{staging} has an unknown file {found[0]}. Move the file or pass another --dataset_dir.")


def _clear_away(target: Path, staging: Path) -> None:
    """Delete a staging folder that is left over although its prepared folder is done."""
    # Left by a process that was killed between renaming the prepared folder and deleting the staging folder.
    if "request" in read_object(staging / PUBLISHED) and not (staging / "folder").exists():
        with contextlib.suppress(UserError), _staging_lock(staging):  # skipped if another process uses the folder
            remove_folder(staging, PUBLISHED)


def _publish(folder: Path, target: Path) -> None:
    """Rename a finished folder to its final path `target`."""
    if target.exists():
        replaced = folder.with_name("replaced")  # in the staging folder, which is deleted later
        shutil.rmtree(replaced, ignore_errors=True)
        target.rename(replaced)
    folder.rename(target)


def _warn_of_changes(data: PreparedData, args: DataArguments) -> None:
    """Warn if a local file was added or changed after the folder was prepared."""
    paths = [Path(path) for pattern in args.data_files for path in glob.glob(pattern, recursive=True)]
    known = {(file["path"], file["bytes"]) for file in data.manifest.source.get("files", []) if args.data_files}
    # Deleted files cause no warning: their text is still in the folder.
    changed = [path for path in paths if path.is_file() and (str(path), path.stat().st_size) not in known]
    if changed:
        logger.warning(
            "%s was prepared before %s changed. Pass --overwrite to prepare the folder again.", data.path, changed[0]
        )

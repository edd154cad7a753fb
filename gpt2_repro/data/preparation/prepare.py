"""Prepare a folder: build it in a staging folder that can be resumed, then rename it into place."""

import contextlib
import errno
import glob
import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpt2_repro.data.arguments import DataArguments, PreparationOptions
from gpt2_repro.data.preparation.build import REQUEST, build_folder, check_request
from gpt2_repro.data.prepared import PreparedData, exclusive_lock, first_difference, request_of
from gpt2_repro.errors import UserError
from gpt2_repro.files import read_object, remove_folder, write_whole
from gpt2_repro.manifest import MANIFEST


logger = logging.getLogger(__name__)

PUBLISHED = "published.json"  # the name of REQUEST once the prepared folder is finished: nothing is left to resume


def prepare(args: DataArguments, options: PreparationOptions | None = None) -> PreparedData:
    """Prepare `args.dataset_dir`, or find it finished.

    Unfinished work is kept in `<dataset_dir>.staging`; a later call with the same arguments resumes it.
    Raises UserError for a folder prepared with other arguments, a folder that is not ours, an unknown source, an empty
    corpus or split, a full disk, and if a training reads the folder to be replaced.
    """
    options = options or PreparationOptions()
    target = Path(args.dataset_dir)
    request = request_of(args)
    if args.source == "files" and not args.data_files:
        raise UserError("No text is named. Pass --data_files with your files, folders or globs.")
    if not target.name:
        raise UserError(f"--dataset_dir {args.dataset_dir} has no name of its own: name a folder, as in data/books")
    staging = target.with_name(target.name + ".staging")
    if target.exists() and not options.overwrite:
        data = PreparedData.read(target)
        if difference := first_difference(data.manifest.request, request):
            key, holds, value = difference
            fix = "Pass --overwrite or another --dataset_dir."
            raise UserError(f"{target} was prepared with {key} {holds}, not {value}. {fix}")
        for split in data.manifest.shards:
            data.check_shards(split)
        logger.info("%s is already prepared", target)
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
            raise UserError(f"the disk of {target} is full: make space and start the same command again") from None
        remove_folder(staging, PUBLISHED)
    return PreparedData.read(target)


@contextlib.contextmanager
def _replacement_lock(target: Path) -> Iterator[None]:
    """Lock a prepared folder that will be replaced. Raises UserError if it is not ours, or something reads it."""
    if not target.exists():
        yield
        return
    if "request" not in read_object(target / MANIFEST):
        PreparedData.read(target)  # raises
    with exclusive_lock(target, f"A training reads {target}. Wait for it, or pass another --dataset_dir."):
        yield


@contextlib.contextmanager
def _staging_lock(staging: Path) -> Iterator[None]:
    """Create the staging folder for this process alone. Raises UserError if another process has it, or on failure."""
    try:
        staging.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{staging} cannot be made ({error.strerror}): name another --dataset_dir") from None
    with exclusive_lock(staging, f"another process is preparing {staging.with_suffix('')}: wait for it or end it"):
        yield


def _claim(staging: Path, request: dict[str, Any]) -> None:
    """Mark an empty staging folder as ours. Raises UserError if it holds files and prepare_data.py did not make it."""
    found = sorted(path.name for path in staging.iterdir() if not path.name.startswith(f".{REQUEST}."))
    markers = (staging / REQUEST, staging / PUBLISHED, staging / "folder" / MANIFEST)
    if not found:
        write_whole(staging / REQUEST, json.dumps({"request": request}))
    elif not any("request" in read_object(marker) for marker in markers):
        raise UserError(f"{staging} holds {found[0]}, which is not ours. Move it away or pass another --dataset_dir.")


def _clear_away(target: Path, staging: Path) -> None:
    """Remove the staging folder of a process that was killed after it had renamed the finished folder into place."""
    if "request" in read_object(staging / PUBLISHED) and not (staging / "folder").exists():
        with contextlib.suppress(UserError), _staging_lock(staging):  # unless another process starts there
            remove_folder(staging, PUBLISHED)


def _publish(folder: Path, target: Path) -> None:
    """Rename a finished folder into place. The one it replaces moves into the staging folder and is deleted with it."""
    if target.exists():
        replaced = folder.with_name("replaced")
        shutil.rmtree(replaced, ignore_errors=True)
        target.rename(replaced)
    folder.rename(target)


def _warn_of_changes(data: PreparedData, args: DataArguments) -> None:
    """Local files that came or changed after the preparation are not in the folder; those that went are."""
    paths = [Path(path) for pattern in args.data_files for path in glob.glob(pattern, recursive=True)]
    known = {(file["path"], file["bytes"]) for file in data.manifest.source.get("files", []) if args.data_files}
    changed = [path for path in paths if path.is_file() and (str(path), path.stat().st_size) not in known]
    if changed:
        logger.warning("%s does not hold %s as it is now: --overwrite prepares it anew", data.path, changed[0])

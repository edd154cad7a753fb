"""Restore a run from its copy at another place (--sync_from, by default --sync_to) on an empty machine."""

import contextlib
import functools
import logging
import os
import shutil
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

from gpt2_repro.errors import RunFailed, UserError, error_number, in_a_line
from gpt2_repro.files import sync_folder
from gpt2_repro.run_record import RunRecord, checkpoints, layout
from gpt2_repro.run_record.layout import CHECKPOINT_MANIFEST, step_of
from gpt2_repro.run_record.place import Place, open_place
from gpt2_repro.text import size as size_text
from gpt2_repro.training.arguments import TrainingRecipe, output_dir_of
from gpt2_repro.training.copying import SMALL_FILES, copies_at, manifest_at


logger = logging.getLogger(__name__)

RESTORE_HOURS = 12.0  # longest time that the other ranks wait until rank 0 has restored the run


@contextlib.contextmanager
def faults_in_words(name: str) -> Iterator[None]:
    """Raise RunFailed, which a supervisor retries, if a place cannot be reached."""
    try:
        yield
    except Exception as error:
        if isinstance(error, UserError | RunFailed) or error_number(error) in checkpoints.DISK_FAULTS:
            raise
        raise RunFailed(f"Cannot read {name} ({type(error).__name__}: {in_a_line(error)}).") from None


def restore_before_start(recipe: TrainingRecipe) -> None:
    """Restore a run on rank 0 while the other ranks wait. They all share the run directory."""
    training = recipe.training
    names = [name for name in dict.fromkeys((training.sync_from or training.sync_to, training.sync_to)) if name]
    if names and os.environ.get("RANK", "0") == "0":
        run = RunRecord(output_dir_of(recipe))
        run.check_owner()
        for name in names:
            if Path(name).resolve().is_relative_to(run.path.resolve()):
                raise UserError(f"--sync_to {name} is inside of the run directory. Pass a folder on another disk.")
            open_place(name)  # names a missing package
        try:
            with faults_in_words(names[0]):
                restore(run, names[0])
        finally:
            run.unlock()
    if names and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        store, done = _store(), f"restored-{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"
        if os.environ.get("RANK") == "0":
            store.set(done, "")
        store.wait([done], timedelta(hours=RESTORE_HOURS))


@functools.cache  # without a launcher's store, rank 0 hosts it
def _store() -> Any:
    from torch.distributed import rendezvous  # 2 s

    return next(iter(rendezvous("env://")))[0]


def restore(run: RunRecord, name: str) -> None:
    """Restore the newest complete copy at the place `name`, unless the run directory has a checkpoint as new.

    Raises UserError if all copies are damaged and the run directory has no complete checkpoint.
    """
    place = open_place(name)
    here = checkpoints.newest_complete(run.path)[0]
    newer = {step: manifest for step, manifest in copies_at(place).items() if here is None or step > step_of(here)}
    # A run that went back restores no checkpoint that it has set aside, if its next copy was not complete.
    newer = {step: manifest for step, manifest in newer.items() if step not in checkpoints.abandoned(run.path)}
    defects = []
    if any(newer.values()):
        run.lock()
    for step, manifest in newer.items():
        target = layout.checkpoint_path(run.path, step)
        copied = f"{name.rstrip('/')}/{target.name}"
        if not manifest:
            logger.info("skipping %s: its copy was interrupted", copied)
        elif defect := _fetch(place, target, manifest):
            defects.append(f"skipping {copied}: {defect}")
            logger.warning(defects[-1])
        else:
            return logger.info("restored %s from %s", target, name)
    if defects and here is None:
        raise UserError(f"All copies are damaged ({'; '.join(defects)}). Pass another --sync_to and --output_dir.")
    return None


def _fetch(place: Place, target: Path, manifest: dict[str, Any]) -> str | None:
    """Copy a checkpoint and the files of its run to the run directory, or return the defect of the copy."""
    run, size = target.parent, sum(file["bytes"] for file in manifest["files"].values())
    staged = run / layout.RESTORING
    if (missing := size - shutil.disk_usage(run).free) > 0:
        raise UserError(f"Restoring {target} needs {size_text(missing)} more disk space. Free some space.")
    shutil.rmtree(staged, ignore_errors=True)
    try:
        small = [file for file in place.names() if file in SMALL_FILES]
        if defect := _fetch_folder(place, target.name, staged, manifest):
            return defect
        place.get("", staged, small)
        final = manifest_at(place, layout.FINAL)
        has_final = bool(final) and _fetch_folder(place, layout.FINAL, staged, final) is None
        sync_folder(staged)
        for file in small:
            (staged / file).replace(run / file)
        if has_final:
            checkpoints.publish(staged / layout.FINAL, run / layout.FINAL)
        checkpoints.publish(staged / target.name, target)  # last, so that a kill before it repeats everything
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    return None


def _fetch_folder(place: Place, name: str, staged: Path, manifest: dict[str, Any]) -> str | None:
    """Copy a checkpoint or final/ to a staging folder, or return the defect of the copy."""
    files = [*manifest["files"], CHECKPOINT_MANIFEST]
    if any(Path(file).is_absolute() or ".." in Path(file).parts for file in files):
        return "its manifest names files outside of it"
    (staged / name).mkdir(parents=True)
    try:
        place.get(name, staged / name, files)
        if name == layout.FINAL:
            place.get(name, staged / name, ["README.md"])  # not in the manifest
    except FileNotFoundError as error:
        return f"a file is missing ({in_a_line(error)})"
    return checkpoints.defect(staged / name, read_files=True)


def identity_at(name: str) -> dict[str, Any] | None:
    """Return the identity of the run whose checkpoints are at a place, or None without a complete checkpoint."""
    with faults_in_words(name):
        manifests = [manifest for manifest in copies_at(open_place(name)).values() if manifest]
        return manifests[0].get("run_identity", {}) if manifests else None

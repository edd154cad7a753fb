"""Restore a run from its copy at another place (--sync_from, by default --sync_to) on an empty machine."""

import contextlib
import dataclasses
import json
import logging
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from gpt2_repro.checkpoints.copying import SMALL_FILES, require_own
from gpt2_repro.checkpoints.manifest import defect, read_manifest
from gpt2_repro.checkpoints.place import Place
from gpt2_repro.checkpoints.resuming import RunIdentity, check_owner, check_resumable
from gpt2_repro.checkpoints.rotation import (
    DISK_FAULTS,
    abandoned,
    complete_checkpoints,
    newest_complete,
    publish,
    sweep,
)
from gpt2_repro.cli import Progress
from gpt2_repro.errors import RunFailed, UserError, error_number, in_a_line
from gpt2_repro.files import size_of, sync_folder, write_whole
from gpt2_repro.run_record import RunRecord, layout
from gpt2_repro.run_record.layout import CHECKPOINT_MANIFEST, step_of
from gpt2_repro.text import size as size_text


logger = logging.getLogger(__name__)

SMALL_BYTES = 1 << 24  # largest size of a model card, which no manifest lists


@contextlib.contextmanager
def faults_in_words(name: str) -> Iterator[None]:
    """Raise RunFailed, which a supervisor retries, if a place cannot be reached."""
    try:
        yield
    except Exception as error:
        if isinstance(error, UserError | RunFailed) or error_number(error) in DISK_FAULTS:
            raise
        raise RunFailed(f"Cannot read {name} ({type(error).__name__}: {in_a_line(error)}).") from None


def restore_copies(run: RunRecord, identity: RunIdentity, *, sync_from: str, sync_to: str) -> Path | None:
    """Restore a run from the newest of its copies at two places ("": none). Call this on rank 0 only.

    Returns the newest complete checkpoint if its files were read and verified. Without a place, the result is None.
    """
    options = {name: option for name, option in ((sync_from, "--sync_from"), (sync_to, "--sync_to")) if name}
    if not options:
        return None
    check_owner(run)
    for name, option in options.items():
        with faults_in_words(name):
            place = Place(name, option=option)  # names a missing package
        if place.is_local and (_is_within(Path(place.root), run.path) or _is_within(run.path, Path(place.root))):
            raise UserError(f"{option} {name} and the run directory overlap. Pass a folder on another disk.")
    try:
        if (run.path / layout.LOCK).is_file():
            run.lock()  # the lock then shows whether a place is the run directory
        newest = newest_complete(run.path)[0]
        for name, option in options.items():
            with faults_in_words(name):
                newest = restore(run, name, identity, option, newest)
        return newest
    finally:
        run.unlock()


def _is_within(path: Path, folder: Path) -> bool:
    """Return whether a path is a folder or inside of it, also through links and bind mounts."""
    path, folder = path.resolve(), folder.resolve()
    parents = (parent for parent in (path, *path.parents) if folder.exists() and parent.exists())
    return path.is_relative_to(folder) or any(parent.samefile(folder) for parent in parents)


def restore(run: RunRecord, name: str, identity: RunIdentity, option: str, own: Path | None) -> Path | None:
    """Restore the newest complete copy at the place `name`, unless it is not newer than the checkpoint `own`.

    `own` is the newest complete checkpoint of the run directory. Returns the one after the restore.

    Raises UserError if the copies belong to another run, or if all are damaged and the run directory has no complete
    checkpoint.
    """
    place = Place(name, option=option)
    if identity.allow_change and not _is_earlier(place, run):
        # A run may change its settings, but not become another run that has copies there.
        identity = dataclasses.replace(identity, changeable=())
    require_own(place, run.path, identity, option=option)
    copies = {step: manifest for step, manifest in place.manifests().items() if manifest}
    if copies:
        identity.require_same(copies[max(copies)].get("run_identity", {}), where=name, option=option)
    else:
        logger.info("%s has no checkpoint to restore", name)
    # A run that went back restores no checkpoint that it has set aside, if its next copy was not complete.
    newer = [step for step in copies if step > step_of(own or Path()) and step not in abandoned(run.path)]
    defects: dict[str, str] = {}
    if newer:
        newest = newer[0]
        where = f"{name.rstrip('/')}/{layout.checkpoint_path(Path(), newest)}"
        max_steps = identity.values.get("max_steps", newest)
        check_resumable(where, copies[newest], identity, max_steps=max_steps)
        run.lock()
        sweep(run.path)
    for target in (layout.checkpoint_path(run.path, step) for step in newer):
        with tempfile.TemporaryDirectory(dir=run.path, prefix=layout.RESTORING) as folder:
            staged = Path(folder)
            if problem := _fetch(place, target.name, staged):
                defects[target.name] = f"skipping {name.rstrip('/')}/{target.name}: {problem}"
                logger.warning(defects[target.name])
                continue
            has_final = _fetch(place, layout.FINAL, staged) is None
            sync_folder(staged)
            for file in SMALL_FILES:
                with contextlib.suppress(FileNotFoundError):
                    write_whole(run.path / file, place.read(file))
            if has_final:
                publish(staged / layout.FINAL, run.final)
            publish(staged / target.name, target)  # last, so that a kill before it repeats everything
        logger.info("restored %s from %s", target, name)
        own = target
        break
    else:
        if defects and own is None:
            damaged = "; ".join(defects.values())
            raise UserError(f"All copies are damaged ({damaged}). Pass another {option} and --output_dir.")
    for skipped in defects:  # the next copy replaces it
        (run.path / f"abandoned-{skipped}").mkdir(exist_ok=True)
    return own


def _is_earlier(place: Place, run: RunRecord) -> bool:
    """Return whether a place has this run, perhaps with earlier settings. Any run, if the run directory has none."""
    manifests = map(read_manifest, complete_checkpoints(run.path))
    saved = [run.environment().run_identity, *(manifest.get("run_identity") for manifest in manifests)]
    own = [identity for identity in saved if identity]
    if not own or place.run_identity() in own:
        return True
    with contextlib.suppress(FileNotFoundError):  # the first event has the time when the run began
        return place.read(layout.METRICS).partition(b"\n")[0] == run.metrics.read_bytes().partition(b"\n")[0] != b""
    return False


def _fetch(place: Place, name: str, staged: Path) -> str | None:
    """Copy a checkpoint or final/ to a staging folder, or return the defect of the copy."""
    manifest = place.manifest(name)
    if not (files := manifest.get("files", {})):
        return "its manifest is missing or damaged"
    if any(Path(file).is_absolute() or ".." in Path(file).parts for file in files):
        return "its manifest names files outside of it"
    total = sum(file["bytes"] for file in files.values())
    if (missing := total - shutil.disk_usage(staged).free) > 0:
        raise UserError(f"Restoring {name} needs {size_text(missing)} more disk space. Free some space.")
    logger.info("restoring %s (%s) from %s", name, size_text(total), place.name)
    model_card = ["README.md"] if name == layout.FINAL else []  # not in the manifest
    with Progress(desc=f"restoring {name}", total=total, unit="B", unit_scale=True) as bar:
        place = Place(place.name, lambda: bar.update(size_of(staged / name) - bar.n))
        for file in (*files, *model_card):
            with contextlib.suppress(FileNotFoundError):
                # The manifest of a stranger can state less than the disk would receive.
                if place.size(f"{name}/{file}") > files.get(file, {"bytes": SMALL_BYTES})["bytes"]:
                    return f"{file} is larger than expected"
                sha256 = place.get(f"{name}/{file}", staged / name / file)
                if file in files and sha256 != files[file]["sha256"]:
                    return f"{file} is damaged"
    write_whole(staged / name / CHECKPOINT_MANIFEST, json.dumps(manifest, indent=1))
    return defect(staged / name)

"""Restore a run from its copy at another place (--sync_from, by default --sync_to) on an empty machine."""

import contextlib
import dataclasses
import json
import logging
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

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

CARD = "README.md"  # the model card of final/, which no manifest lists
SMALL_BYTES = 1 << 24  # its largest size


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
    """Restore a run from the newest of its copies at one or two places ("": none). Call this on rank 0 only.

    Returns the newest complete checkpoint if its files were read and verified.
    """
    options: dict[str, str] = {}
    if sync_from:
        options[sync_from] = "--sync_from"
    if sync_to:
        options[sync_to] = "--sync_to"
    check_owner(run)
    for name, option in options.items():
        with faults_in_words(name):
            place = Place(name, option=option)  # names a missing package
        root = Path(place.root)
        if place.is_local and (_is_within(root, run.path) or _is_within(run.path, root)):
            raise UserError(f"{option} {name} and the run directory overlap. Pass a folder on another disk.")
    try:
        if (run.path / layout.LOCK).is_file():
            run.lock()  # the lock then shows whether a place is the run directory
        newest, _ = newest_complete(run.path)
        for name, option in options.items():
            with faults_in_words(name):
                newest = restore(run, name, identity, option, newest)
        return newest
    finally:
        run.unlock()


def _is_within(path: Path, folder: Path) -> bool:
    """Return whether a path is a folder or inside of it, also through links and bind mounts."""
    path = path.resolve()
    folder = folder.resolve()
    if path.is_relative_to(folder):
        return True
    if not folder.exists():
        return False
    return any(parent.exists() and parent.samefile(folder) for parent in (path, *path.parents))


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
    copies: dict[int, dict[str, Any]] = {}
    for step, manifest in place.manifests().items():
        if manifest:
            copies[step] = manifest
    if not copies:
        logger.info("%s has no checkpoint to restore", name)
        return own
    identity.require_same(copies[max(copies)].get("run_identity", {}), where=name, option=option)
    newer = _newer_steps(copies, run, own)
    if not newer:
        return own
    newest = newer[0]
    folder = f"{name.rstrip('/')}/{layout.checkpoint_path(Path(), newest)}"
    max_steps = identity.values.get("max_steps", newest)
    check_resumable(folder, copies[newest], identity, max_steps=max_steps)
    run.lock()
    sweep(run.path)
    return _restore_newest(run, place, newer, option, own)


def _newer_steps(copies: Iterable[int], run: RunRecord, own: Path | None) -> list[int]:
    """Return the steps of the copies that are newer than the checkpoint `own`, in their order."""
    step_before = -1 if own is None else step_of(own)
    # A run that went back restores no checkpoint that it has set aside, if its next copy was not complete.
    set_aside = abandoned(run.path)
    return [step for step in copies if step > step_before and step not in set_aside]


def _restore_newest(run: RunRecord, place: Place, steps: list[int], option: str, own: Path | None) -> Path | None:
    """Restore the first of the `steps` whose copy is intact. Return its checkpoint, or `own` if there is none.

    Raises UserError if all copies are damaged, and `own` is None.
    """
    defects: dict[str, str] = {}
    restored = own
    for step in steps:
        target = layout.checkpoint_path(run.path, step)
        problem = _restore_checkpoint(run, place, target)
        if problem is None:
            logger.info("restored %s from %s", target, place.name)
            restored = target
            break
        defects[target.name] = f"skipping {place.name.rstrip('/')}/{target.name}: {problem}"
        logger.warning(defects[target.name])
    if restored is None:
        damaged = "; ".join(defects.values())
        raise UserError(f"All copies are damaged ({damaged}). Pass another {option} and --output_dir.")
    for skipped in defects:  # the next copy replaces it
        (run.path / f"abandoned-{skipped}").mkdir(exist_ok=True)
    return restored


def _restore_checkpoint(run: RunRecord, place: Place, target: Path) -> str | None:
    """Restore one checkpoint, with final/ and the small files. Return why it cannot be restored, or None."""
    with tempfile.TemporaryDirectory(dir=run.path, prefix=layout.RESTORING) as folder:
        staged = Path(folder)
        problem = _fetch(place, target.name, staged)
        if problem is not None:
            return problem
        has_final = _fetch(place, layout.FINAL, staged) is None
        sync_folder(staged)
        for file in SMALL_FILES:
            with contextlib.suppress(FileNotFoundError):
                write_whole(run.path / file, place.read(file))
        if has_final:
            publish(staged / layout.FINAL, run.final)
        publish(staged / target.name, target)  # last, so that a kill before it repeats everything
    return None


def _is_earlier(place: Place, run: RunRecord) -> bool:
    """Return whether a place has this run, perhaps with earlier settings. Any run, if the run directory has none."""
    own = [run.environment().run_identity]
    for checkpoint in complete_checkpoints(run.path):
        own.append(read_manifest(checkpoint).get("run_identity", {}))
    known = [identity for identity in own if identity]
    if not known or place.run_identity() in known:
        return True
    try:
        copied = place.read(layout.METRICS)
        written = run.metrics.read_bytes()
    except FileNotFoundError:
        return False
    # The first event has the time when the run began.
    first_event = _first_line(written)
    return first_event != b"" and _first_line(copied) == first_event


def _first_line(content: bytes) -> bytes:
    return content.partition(b"\n")[0]


def _fetch(place: Place, name: str, staged: Path) -> str | None:
    """Copy a checkpoint or final/ to a staging folder, or return the defect of the copy."""
    manifest = place.manifest(name)
    files = manifest.get("files", {})
    if not files:
        return "its manifest is missing or damaged"
    for file in files:
        if Path(file).is_absolute() or ".." in Path(file).parts:
            return "its manifest names files outside of it"
    total = sum(file["bytes"] for file in files.values())
    missing = total - shutil.disk_usage(staged).free
    if missing > 0:
        raise UserError(f"Restoring {name} needs {size_text(missing)} more disk space. Free some space.")
    logger.info("restoring %s (%s) from %s", name, size_text(total), place.name)
    with Progress(desc=f"restoring {name}", total=total, unit="B", unit_scale=True) as bar:
        place = Place(place.name, lambda: bar.update(size_of(staged / name) - bar.n))
        for file, expected in files.items():
            problem = _fetch_file(place, name, file, staged, largest=expected["bytes"], sha256=expected["sha256"])
            if problem is not None:
                return problem
        if name == layout.FINAL and CARD not in files:
            problem = _fetch_file(place, name, CARD, staged, largest=SMALL_BYTES)
            if problem is not None:
                return problem
    write_whole(staged / name / CHECKPOINT_MANIFEST, json.dumps(manifest, indent=1))
    return defect(staged / name)


def _fetch_file(
    place: Place, name: str, file: str, staged: Path, *, largest: int, sha256: str | None = None
) -> str | None:
    """Copy a file of the folder `name` to a staging folder, if it exists. Return the defect of the copy, or None."""
    try:
        # The manifest of a stranger can state less than the disk would receive.
        if place.size(f"{name}/{file}") > largest:
            return f"{file} is larger than expected"
        copied = place.get(f"{name}/{file}", staged / name / file)
    except FileNotFoundError:
        return None
    if sha256 is not None and copied != sha256:
        return f"{file} is damaged"
    return None

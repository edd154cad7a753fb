"""Finish writing, verify, find and delete the checkpoints in a run directory.

A checkpoint is complete if its manifest.json is intact and matches the files.
"""

import contextlib
import errno
import hashlib
import json
import logging
import shutil
from collections.abc import Iterator, Mapping
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

from gpt2_repro.errors import RunFailed, UserError, error_number
from gpt2_repro.files import from_json, read_object, sha256_of, sync, sync_folder, to_json, write_whole
from gpt2_repro.run_record import events, layout
from gpt2_repro.run_record.environment import TrainingRecord
from gpt2_repro.run_record.layout import CHECKPOINT_MANIFEST, Rotation


logger = logging.getLogger(__name__)

DISK_FAULTS = {errno.ENOSPC: "full", errno.EDQUOT: "full", errno.EROFS: "read-only"}
SILLY_RENAME = ".nfs"  # prefix of a file on NFS that was deleted while a process had it open
_warned: set[Path] = set()  # the folders whose deletion has failed in this process


def seal(folder: Path, files: dict[str, dict[str, Any]], **facts: Any) -> None:
    """Flush all files of a staging folder to disk, then write the manifest.

    `facts` are further entries. `files` has `bytes` and `sha256` of the files that are already hashed and flushed.
    """
    files = dict(files)
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.name.startswith(SILLY_RENAME):
            continue
        if path.is_file() and name not in files:
            files[name] = {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
            sync(path)
        elif path.is_dir():
            sync(path)
    # The model card of final/ is written later, so the manifest does not list it.
    manifest = json.loads(to_json(facts | {"files": dict(sorted(files.items()))}))
    write_whole(folder / CHECKPOINT_MANIFEST, json.dumps(manifest | {"sha256": manifest_hash(manifest)}, indent=1))
    sync(folder)


def publish(staged: Path, target: Path) -> None:
    """Rename a complete staging folder to `target`. An existing `target` is replaced.

    Raises UserError if the existing `target` can neither be deleted nor replaced.
    """
    discard(target)
    try:
        staged.rename(target)
    except OSError as error:
        if not target.exists():
            raise
        if any(target.iterdir()):
            problem = f"{target} cannot be replaced ({error.strerror})"
            raise UserError(f"{problem}. Move it out of the run directory, and run the same command again.") from None
        _fill(staged, target)
    sync(target.parent)


def _fill(staged: Path, target: Path) -> None:
    """Move the content of a complete staging folder to an empty folder, such as a mount point, its manifest last."""
    others = [path for path in staged.iterdir() if path.name != CHECKPOINT_MANIFEST]
    for path in others:
        shutil.move(path, target / path.name)
    sync_folder(target)
    write_whole(target / CHECKPOINT_MANIFEST, (staged / CHECKPOINT_MANIFEST).read_bytes())
    sync(target)
    delete_tree(staged)


def discard(path: Path) -> None:
    """Delete a folder if it exists. If that fails, log one warning."""
    if not path.exists():
        return
    trash = path.with_name(f"{layout.TRASH}-{path.name}")
    while trash.exists() and not delete_tree(trash):
        trash = trash.with_name(f"{layout.TRASH}-{trash.name}")
    try:
        path.rename(trash)  # if the process is killed, no partly deleted folder keeps the old name
    except OSError:  # a folder of a container's image, a mount point, or a folder without permission
        _delete_in_place(path)
    else:
        delete_tree(trash)  # the next call of `sweep` deletes the rest


def _delete_in_place(path: Path) -> None:
    """Delete a folder that cannot be renamed, its manifest first, so that it is not complete meanwhile."""
    try:
        (path / CHECKPOINT_MANIFEST).unlink(missing_ok=True)
    except OSError as error:
        _warn_once(path, f" ({error.strerror})")
    else:
        delete_tree(path)


def delete_tree(path: Path) -> bool:
    """Delete a folder and return whether it is gone. If that fails, log one warning."""
    reason = ""
    try:
        shutil.rmtree(path)
    except OSError as error:
        reason = f" ({error.strerror})"
        shutil.rmtree(path, ignore_errors=True)  # the rest
    if not path.exists():
        return True
    # On NFS, a deleted file that a process has open keeps another name until it is closed.
    left = [file for file in path.rglob("*") if file.is_file() and not file.name.startswith(SILLY_RENAME)]
    if left or not list(path.rglob(f"{SILLY_RENAME}*")):
        _warn_once(path, reason)
    return False


def _warn_once(path: Path, reason: str) -> None:
    if path not in _warned:
        _warned.add(path)
        logger.warning("%s cannot be deleted%s. The run continues.", path, reason)


def sweep(run: Path) -> None:
    """Delete the staging folder and partly deleted checkpoints that a killed run left."""
    for path in leftovers(run):
        delete_tree(path)


def leftovers(run: Path) -> list[Path]:
    """Return the folders that a killed run left: unfinished saves and restores, partly deleted checkpoints."""
    folders = [run / layout.STAGING, *run.glob(f"{layout.RESTORING}*"), *run.glob(f"{layout.TRASH}-*")]
    return [folder for folder in folders if folder.exists()]


def defect(checkpoint: Path, *, read_files: bool = False) -> str | None:
    """Return why a checkpoint or final/ is not complete, or None if it is.

    By default, only the sizes of its files are checked.
    """
    files = read_manifest(checkpoint).get("files")
    if files is None:
        return "its manifest is missing or damaged"
    for name, expected in files.items():
        path = checkpoint / name
        if not path.is_file() or path.stat().st_size != expected["bytes"]:
            return f"{name} is missing or cut short"
    if not read_files:
        return None
    with ThreadPool(8) as pool:  # in contrast to a ThreadPoolExecutor, it does not delay an interrupt
        hashes = zip(files, pool.imap(sha256_of, map(checkpoint.joinpath, files)), strict=True)
        return next((f"{name} is damaged" for name, sha256 in hashes if sha256 != files[name]["sha256"]), None)


def complete_checkpoints(run: Path) -> list[Path]:
    """Return the complete checkpoints of a run by their file sizes, newest step first."""
    return [path for path in layout.checkpoints(run) if defect(path) is None]


def newest_step(run: Path) -> int:
    """Return the step of the newest complete checkpoint of a run, or -1 without a checkpoint."""
    return max(map(layout.step_of, complete_checkpoints(run)), default=-1)


def newest_complete(run: Path, *, verified: Path | None = None) -> tuple[Path | None, list[str]]:
    """Return the newest checkpoint with correct hashes, and why others were skipped.

    The files of the checkpoint `verified`, whose hashes are known to be correct, are not read again.
    """
    skipped: list[str] = []
    for checkpoint in layout.checkpoints(run):
        if (reason := defect(checkpoint, read_files=checkpoint != verified)) is None:
            return checkpoint, skipped
        skipped.append(f"skipping {checkpoint}: {reason}")
    return None, skipped


def choose(run: Path, name: str = "", *, verified: Path | None = None) -> tuple[Path | None, list[str]]:
    """Return the checkpoint with this name or path, or `newest_complete` without a name.

    Raises UserError if the run has no complete checkpoint of this name.
    """
    if not name:
        return newest_complete(run, verified=verified)
    chosen = run / Path(name).name
    elsewhere = len(Path(name).parts) > 1 and Path(name).parent.resolve() != run.resolve()
    if elsewhere or layout.step_of(chosen) < 0 or not chosen.is_dir():
        names = ", ".join(path.name for path in complete_checkpoints(run)) or "none"
        fix = "For weights of another run, pass --init_from."
        raise UserError(f"{run} has no checkpoint {name}. Complete checkpoints: {names}. {fix}")
    if reason := defect(chosen, read_files=True):
        raise UserError(f"{chosen} is not complete ({reason}).")
    return chosen, []


def set_aside(run: Path, *, after: int) -> list[Path]:
    """Rename checkpoints after a step to abandoned-checkpoint-N. Return the new paths.

    In a folder that cannot be renamed, the manifest is renamed, so that the run does not choose it. Raises UserError if
    that fails too.
    """
    aside = []
    for path in layout.checkpoints(run):
        if layout.step_of(path) <= after:
            continue
        target = path.with_name(f"abandoned-{path.name}")
        while target.exists():
            target = target.with_name(f"abandoned-{target.name}")
        try:
            aside.append(path.rename(target))
        except OSError as error:
            aside.append(_set_aside_in_place(path, error))
    return aside


def _set_aside_in_place(path: Path, error: OSError) -> Path:
    manifest = path / CHECKPOINT_MANIFEST
    target = path / f"abandoned-{CHECKPOINT_MANIFEST}"
    try:
        return manifest.rename(target) if manifest.exists() else path
    except OSError:
        problem = f"{path} cannot be renamed ({error.strerror})"
        raise UserError(f"{problem}, and the run goes back before it. Move it out of the run directory.") from None


def abandoned(run: Path) -> set[int]:
    """Return the steps of the checkpoints that `set_aside` has renamed."""
    return {int(step) for path in run.glob("abandoned-*") if (step := path.name.rpartition("-")[2]).isdecimal()}


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint or final/, or {} if missing or damaged."""
    return intact_manifest(read_object(checkpoint / CHECKPOINT_MANIFEST))


def intact_manifest(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return a manifest, or {} if it is damaged."""
    files, identity = manifest.get("files"), manifest.get("run_identity", {})
    if not isinstance(files, dict) or not isinstance(identity, dict):
        return {}
    intact = all(isinstance(file, dict) and {"bytes", "sha256"} <= file.keys() for file in files.values())
    return manifest if intact and manifest.get("sha256") == manifest_hash(manifest) else {}


def manifest_hash(manifest: dict[str, Any]) -> str:
    """Return the sha256 of all entries of a manifest except its entry `sha256`."""
    content = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def training_record(checkpoint: Path) -> TrainingRecord | None:
    """Return how the weights in a `final/` or `checkpoint-N` were trained, or None."""
    manifest = read_manifest(checkpoint)
    if "environment" not in manifest:  # a checkpoint-N uses the environment of its run
        run, known = read_object(checkpoint.parent / layout.ENVIRONMENT), "run_identity" in manifest
        manifest["environment"] = run | {"run_identity": manifest["run_identity"]} if run and known else {}
        step = layout.step_of(checkpoint)
        manifest |= {
            "step": step,
            "averaged": False,
            "losses": events.validation_losses(checkpoint.parent / layout.METRICS, step),
        }
    if "run_identity" not in manifest["environment"]:
        return None
    losses = {key: loss for key, loss in manifest.get("losses", {}).items() if loss is not None}
    with contextlib.suppress(ValueError):
        return from_json(TrainingRecord, manifest | {"losses": losses})
    return None


def size(checkpoint: Path) -> int:
    """Return the total size of a complete checkpoint's files in bytes."""
    return sum(file["bytes"] for file in read_manifest(checkpoint)["files"].values())


def rotate(run: Path, rotation: Rotation, *, also: int = -1) -> None:
    """Delete the complete checkpoints of a run, except those of `to_keep` and the one at step `also`."""
    for path in expendable(run, rotation):
        if layout.step_of(path) != also:
            discard(path)


def expendable(run: Path, rotation: Rotation) -> list[Path]:
    """Return the complete checkpoints of a run that `to_keep` does not keep."""
    complete = {layout.step_of(path): path for path in complete_checkpoints(run)}
    rolling = {step: bool(read_manifest(path).get("rolling")) for step, path in complete.items()}
    stays = to_keep(run, rolling, rotation)
    return [path for step, path in complete.items() if step not in stays]


def to_keep(run: Path, rolling: Mapping[int, bool], rotation: Rotation) -> set[int]:
    """Return the steps of the checkpoints to keep: the newest `keep` (0: all), and those of the other two fields.

    Rolling checkpoints, which the next save replaces, are not counted. The newest checkpoint is always kept. Also kept
    are steps that are multiples of `keep_every`, and with `keep_best` the lowest validation loss.

    Args:
        rolling: for the step of each complete checkpoint, whether it is rolling.
    """
    complete = sorted(rolling, reverse=True)
    lasting = [step for step in complete if not rolling[step]]
    stays = {*complete[:1], *(lasting[: rotation.keep] if rotation.keep else lasting)}
    if rotation.keep_every:
        stays.update(step for step in complete if step % rotation.keep_every == 0)
    if rotation.keep_best:
        validations = [event for event in events.read(run / layout.METRICS)[0] if "eval_loss" in event]
        losses = {event.get("step"): event["eval_loss"] for event in validations}
        measured = {step: loss for step in complete if events.is_number(loss := losses.get(step))}
        stays.update(sorted(measured, key=measured.__getitem__)[:1])
    return stays


@contextlib.contextmanager
def disk_faults_in_words(run: Path, name: str, staging: Path) -> Iterator[None]:
    """Raise RunFailed, and delete `staging`, if the disk of `run` is full or read-only.

    `name` is the name of the checkpoint or final model for the message.
    """
    try:
        yield
    except Exception as error:
        if (fault := DISK_FAULTS.get(error_number(error) or 0)) is None:
            raise
        shutil.rmtree(staging, ignore_errors=True)
        fix = "Free some space" if fault == "full" else "Make it writable"
        problem = f"The disk of {run} is {fault}, so {name} could not be saved"
        raise RunFailed(f"{problem}. {fix} and run the same command again {to_continue(run)}.") from None


def to_continue(run: Path) -> str:
    """Return where the next attempt continues: `to continue from checkpoint-200`."""
    newest = next(iter(complete_checkpoints(run)), None)
    return f"to continue from {newest.name}" if newest else "to start again at step 0: no checkpoint was saved"

"""Publish, find, choose and delete the checkpoints in a run directory."""

import contextlib
import errno
import logging
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gpt2_repro.checkpoints.manifest import SILLY_RENAME, defect, read_manifest
from gpt2_repro.errors import RunFailed, UserError, error_number
from gpt2_repro.files import sync, sync_folder, write_whole
from gpt2_repro.run_record import events, layout
from gpt2_repro.run_record.layout import CHECKPOINT_MANIFEST, Rotation


logger = logging.getLogger(__name__)

DISK_FAULTS = {errno.ENOSPC: "full", errno.EDQUOT: "full", errno.EROFS: "read-only"}
_warned: set[Path] = set()  # the folders whose deletion has failed in this process


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


def sweep(run_directory: Path) -> None:
    """Delete the staging folder and partly deleted checkpoints that a killed run left."""
    for path in leftovers(run_directory):
        delete_tree(path)


def leftovers(run_directory: Path) -> list[Path]:
    """Return the folders that a killed run left: unfinished saves and restores, partly deleted checkpoints."""
    folders = [
        run_directory / layout.STAGING,
        *run_directory.glob(f"{layout.RESTORING}*"),
        *run_directory.glob(f"{layout.TRASH}-*"),
    ]
    return [folder for folder in folders if folder.exists()]


def complete_checkpoints(run_directory: Path) -> list[Path]:
    """Return the complete checkpoints of a run by their file sizes, newest step first."""
    return [path for path in layout.checkpoints(run_directory) if defect(path) is None]


def newest_checkpoint(run_directory: Path) -> Path | None:
    """Return the newest complete checkpoint of a run by its file sizes, or None without one."""
    for path in layout.checkpoints(run_directory):
        if defect(path) is None:
            return path
    return None


def newest_step(run_directory: Path) -> int:
    """Return the step of the newest complete checkpoint of a run, or -1 without a checkpoint."""
    newest = newest_checkpoint(run_directory)
    return -1 if newest is None else layout.step_of(newest)


def newest_complete(run_directory: Path, *, verified: Path | None = None) -> tuple[Path | None, list[str]]:
    """Return the newest checkpoint with correct hashes, and why others were skipped.

    The files of the checkpoint `verified`, whose hashes are known to be correct, are not read again.
    """
    skipped: list[str] = []
    for checkpoint in layout.checkpoints(run_directory):
        reason = defect(checkpoint, read_files=checkpoint != verified)
        if reason is None:
            return checkpoint, skipped
        skipped.append(f"skipping {checkpoint}: {reason}")
    return None, skipped


def choose_checkpoint(
    run_directory: Path, name: str = "", *, verified: Path | None = None
) -> tuple[Path | None, list[str]]:
    """Return the checkpoint with this name or path, or `newest_complete` without a name.

    Raises UserError if the run has no complete checkpoint of this name.
    """
    if not name:
        return newest_complete(run_directory, verified=verified)
    chosen = run_directory / Path(name).name
    is_elsewhere = len(Path(name).parts) > 1 and Path(name).parent.resolve() != run_directory.resolve()
    if is_elsewhere or layout.step_of(chosen) < 0 or not chosen.is_dir():
        names = ", ".join(path.name for path in complete_checkpoints(run_directory)) or "none"
        fix = "For weights of another run, pass --init_from."
        raise UserError(f"{run_directory} has no checkpoint {name}. Complete checkpoints: {names}. {fix}")
    reason = defect(chosen, read_files=True)
    if reason is not None:
        raise UserError(f"{chosen} is not complete ({reason}).")
    return chosen, []


def set_aside(run_directory: Path, *, after: int) -> list[Path]:
    """Rename checkpoints after a step to abandoned-checkpoint-N. Return the new paths.

    In a folder that cannot be renamed, the manifest is renamed, so that the run does not choose it. Raises UserError if
    that fails too.
    """
    aside = []
    for path in layout.checkpoints(run_directory):
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
    if not manifest.exists():
        return path
    try:
        return manifest.rename(target)
    except OSError:
        problem = f"{path} cannot be renamed ({error.strerror})"
        raise UserError(f"{problem}, and the run goes back before it. Move it out of the run directory.") from None


def abandoned(run_directory: Path) -> set[int]:
    """Return the steps of the checkpoints that `set_aside` has renamed."""
    steps: set[int] = set()
    for path in run_directory.glob("abandoned-*"):
        step = path.name.rpartition("-")[2]
        if step.isdecimal():
            steps.add(int(step))
    return steps


def rotate(run_directory: Path, rotation: Rotation, *, also: int = -1) -> None:
    """Delete the complete checkpoints of a run, except those of `to_keep` and the one at step `also`."""
    try:
        deleted = expendable(run_directory, rotation)
    except OSError as error:  # a manifest cannot be read
        logger.warning("Old checkpoints are not deleted: %s. The run continues.", error)
        return
    for path in deleted:
        if layout.step_of(path) != also:
            discard(path)


def expendable(run_directory: Path, rotation: Rotation) -> list[Path]:
    """Return the complete checkpoints of a run that `to_keep` does not keep."""
    complete = complete_checkpoints(run_directory)
    rolling: dict[int, bool] = {}
    for path in complete:
        rolling[layout.step_of(path)] = bool(read_manifest(path).get("rolling"))
    stays = to_keep(run_directory, rolling, rotation)
    return [path for path in complete if layout.step_of(path) not in stays]


def to_keep(run_directory: Path, rolling: Mapping[int, bool], rotation: Rotation) -> set[int]:
    """Return the steps of the checkpoints to keep: the newest `keep` (0: all), and those of the other two fields.

    Rolling checkpoints, which the next save replaces, are not counted. The newest checkpoint is always kept. Also kept
    are steps that are multiples of `keep_every`, and with `keep_best` the lowest validation loss.

    Args:
        rolling: for the step of each complete checkpoint, whether it is rolling.
    """
    complete = sorted(rolling, reverse=True)
    lasting = [step for step in complete if not rolling[step]]
    if rotation.keep:
        lasting = lasting[: rotation.keep]
    stays = {*complete[:1], *lasting}
    if rotation.keep_every:
        stays.update(step for step in complete if step % rotation.keep_every == 0)
    if rotation.keep_best:
        losses = _losses(run_directory, complete)
        if losses:
            stays.add(min(losses, key=losses.__getitem__))
    return stays


def _losses(run_directory: Path, steps: list[int]) -> dict[int, float]:
    """Return the validation loss of each of the steps that has one, in the order of `steps`."""
    recorded: dict[int, Any] = {}
    for event in events.read(run_directory / layout.METRICS)[0]:
        if "eval_loss" in event:
            # With --ema_steps, a checkpoint is evaluated by the average of its weights, which the first step has not yet.
            loss = event.get(f"{events.AVERAGED}_loss", event["eval_loss"])
            recorded[event.get("step", -1)] = loss
    losses: dict[int, float] = {}
    for step in steps:
        loss = recorded.get(step)
        if events.is_number(loss):
            losses[step] = loss
    return losses


@contextlib.contextmanager
def disk_faults_in_words(run_directory: Path, name: str, staging: Path) -> Iterator[None]:
    """Raise RunFailed, and delete `staging`, if the disk of `run_directory` is full or read-only.

    `name` is the name of the checkpoint or final model for the message.
    """
    try:
        yield
    except Exception as error:
        fault = DISK_FAULTS.get(error_number(error) or 0)
        if fault is None:
            raise
        shutil.rmtree(staging, ignore_errors=True)
        fix = "Free some space" if fault == "full" else "Make it writable"
        problem = f"The disk of {run_directory} is {fault}, so {name} could not be saved"
        raise RunFailed(f"{problem}. {fix} and run the same command again {to_continue(run_directory)}.") from None


def to_continue(run_directory: Path) -> str:
    """Return where the next attempt continues: `to continue from checkpoint-200`."""
    newest = newest_checkpoint(run_directory)
    if newest is None:
        return "to start again at step 0: no checkpoint was saved"
    return f"to continue from {newest.name}"

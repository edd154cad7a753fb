"""Copy a run to another place while it trains (--sync_to).

The place has the layout of the run directory. A copy of a checkpoint is complete if its manifest, which is written
last, is intact.
"""

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gpt2_repro.checkpoints import side_process
from gpt2_repro.checkpoints.manifest import SILLY_RENAME, defect, read_manifest
from gpt2_repro.checkpoints.place import Place, absolute
from gpt2_repro.checkpoints.resuming import RunIdentity
from gpt2_repro.checkpoints.rotation import abandoned, complete_checkpoints, newest_step, to_keep
from gpt2_repro.errors import RunFailed, UserError, in_a_line
from gpt2_repro.run_record import RunRecord, layout
from gpt2_repro.run_record.layout import CHECKPOINT_MANIFEST, Rotation, step_of


logger = logging.getLogger(__name__)

COPIER = "import sys; from gpt2_repro.checkpoints import copying; copying.serve(sys.argv[1])"
# The first file has the run identity, so that an interrupted first copy has an owner.
SMALL_FILES = (layout.ENVIRONMENT, layout.METRICS, layout.STATUS, layout.RECIPE, layout.SAMPLES)
PATIENCE = 1800.0  # seconds without a sign of progress after which a copy is given up
PLACE_SECONDS = 60.0  # in which the first copy of a new run should end
RETRIES = 1, 10  # seconds before each further try of the copies at the end of a run
LINE_SECONDS = 30.0  # between two lines while the end of the run waits for a copy
_kept: set[str] = set()  # the copies that this process could not delete


class RunCopier:
    """Copies a run to another place while training continues, one folder at a time. Use it on rank 0 only.

    Args:
        rotation: which copies are kept.
    """

    def __init__(self, run: RunRecord, place: str, rotation: Rotation, identity: RunIdentity) -> None:
        self.run, self.place, self.rotation, self.identity = run, absolute(place), rotation, identity
        self.process = side_process.SideProcess(COPIER, self.place)
        self.job: str | None = None  # the folder that is being copied; "": only the small files
        self.done: set[str] = set()  # the copied folders
        self.signed_at = 0.0  # when the process last made progress
        self.refresh("")  # with an earlier attempt's checkpoints

    def refresh(self, *folders: str) -> None:
        """Copy the checkpoints that are not copied yet, newest first, and then `folders`."""
        names = [path.name for path in complete_checkpoints(self.run.path)]
        self.failed, self.error = False, ""  # whether a copy has failed since then, and why
        self.queue = [*(name for name in names if name not in {*self.done, self.job}), *folders]

    def poll(self, seconds: float = 0.0) -> bool:
        """Start the next copy if none is in progress, and wait up to `seconds`. Return whether a copy has ended."""
        if self.job is None:
            if not self.queue:
                return False
            self.job = self.queue.pop(0)
            if self.process.process.poll() is not None:
                self.process = side_process.SideProcess(COPIER, self.place)
            identity = dataclasses.asdict(self.identity) | {"changeable": sorted(self.identity.changeable)}
            job = {"run": str(self.run.path.resolve()), "name": self.job, "rotation": self.rotation}
            self.process.submit(job | {"identity": identity})
            self.signed_at = time.monotonic()
        reply = self.process.reply(seconds)
        if reply is not None:
            self.signed_at = time.monotonic()
        elif time.monotonic() - self.signed_at > PATIENCE:
            self.process.process.kill()
            reply = {"error": f"no progress for {PATIENCE / 60:.0f} minutes"}
        if not reply:
            return False
        if "error" in reply:
            text = "NOT COPIED: %s to %s (%s). The next checkpoint or start retries."
            logger.warning(text, self.job or "the log", self.place, in_a_line(reply["error"]))
            self.failed, self.queue, self.error = True, [], str(reply["error"])
        else:
            self.done.add(self.job)
            if reply["seconds"]:
                logger.info("copied %s to %s in %.1f s", self.job, self.place, reply["seconds"])
        self.job = None
        return True

    def finish(self) -> Iterator[bool]:
        """Copy the rest of the run, its last state at the end. Yield True every second until this has ended.

        What fails is tried again, unless it takes long.
        """
        began = time.monotonic()
        written_at = began - LINE_SECONDS + 2
        for pause in (0, *RETRIES):
            for _ in range(pause):
                time.sleep(1.0)
                yield True
            self.refresh(*([] if defect(self.run.final) else [layout.FINAL]), "")
            while self.queue or self.job is not None:
                self.poll(1.0)
                if self.job and time.monotonic() - written_at > LINE_SECONDS:
                    written_at = time.monotonic()
                    logger.info("waiting until %s is copied to %s", self.job, self.place)
                yield True
            if not self.failed or time.monotonic() - began > PATIENCE:
                break

    def require_place(self) -> None:
        """Copy the log of a new run. Raise RunFailed if that fails within PLACE_SECONDS."""
        deadline = time.monotonic() + PLACE_SECONDS
        while not self.poll(1.0) and time.monotonic() < deadline:
            pass
        self.require_copied()

    def require_copied(self) -> None:
        """Raise RunFailed if the last copy has failed, or UserError if the place belongs to another run."""
        if self.failed and self.error.startswith("UserError: "):
            raise UserError(self.error.removeprefix("UserError: "))
        if self.failed:
            raise RunFailed(f"The run is not completely copied to {self.place}. Run the same command again to retry.")


def serve(name: str) -> None:
    """Perform the jobs of a RunCopier until the trainer ends."""
    side_process.end_with_parent()

    def perform(job: dict[str, Any], progress: Callable[[], None]) -> dict[str, Any]:
        identity = RunIdentity(**job["identity"])
        return {"seconds": copy(Place(name, progress), job["run"], job["name"], Rotation(*job["rotation"]), identity)}

    side_process.serve(perform)


def require_own(place: Place, run: Path, identity: RunIdentity, *, option: str = "--sync_to") -> None:
    """Raise UserError unless a place is empty or has a copy of the run with this identity.

    Also raise it if the place is the run directory itself, or if it has only the final model of a later step.
    """
    name = place.name
    if saved := place.run_identity():
        identity.require_same(saved, where=name, option=option)
    elif place.names():
        raise UserError(f"{option} {name} is neither empty nor a copy of this run. Pass another {option}.")
    lock = run / layout.LOCK
    with contextlib.suppress(FileNotFoundError):
        # The lock names the process that has locked the run directory.
        if lock.is_file() and lock.stat().st_size and place.read(layout.LOCK) == lock.read_bytes():
            raise UserError(f"{option} {name} is the run directory. Pass a folder on another disk.")
    step = place.manifest(layout.FINAL).get("step", 0)
    if step > last_step(RunRecord(run)) and not place.manifests():
        raise UserError(f"{option} {name} has a final model of step {step}, but no checkpoint. Pass another {option}.")


def last_step(run: RunRecord) -> int:
    """Return the last step that a run has reached, also before it went back, or 0."""
    final = read_manifest(run.final).get("step", 0)
    return max(newest_step(run.path), run.status().step or 0, *abandoned(run.path), final)


def copy(place: Place, run: str, name: str, rotation: Rotation, identity: RunIdentity) -> float:
    """Copy the small files of a run and its folder `name`, and return the seconds.

    If the folder has been copied before or is "", the result is 0. After a checkpoint, incomplete copies are deleted,
    those that the rotation does not keep, and those after the newest step of the run. A deletion that fails is a
    warning.

    Raises UserError, before anything is written, if the place belongs to another run (see `require_own`).
    """
    began, folder = time.monotonic(), Path(run, name)
    require_own(place, Path(run), identity)
    record, copies = RunRecord(run), place.manifests()
    later = max((step for step, its in copies.items() if its), default=0)
    if later > last_step(record):  # for example, the place could not be read at the start
        raise RunFailed(f"it has the newer step {later} of another start of this run")
    for file in SMALL_FILES:
        if Path(run, file).is_file():
            place.write(Path(run, file).read_bytes(), file)  # not put: training appends to the originals
    manifest = read_manifest(folder) if name else {}
    if not manifest:  # it may be deleted by now, if a newer checkpoint is complete
        return 0.0
    if is_new := place.manifest(name) != manifest:
        remove(place, name)  # of an interrupted copy, or from before the run went back
        files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != CHECKPOINT_MANIFEST]
        try:
            for path in [*files, folder / CHECKPOINT_MANIFEST]:
                if not path.name.startswith(SILLY_RENAME):
                    place.put(path, f"{name}/{path.relative_to(folder)}")
        except FileNotFoundError:
            if folder.is_dir():
                raise
            return 0.0  # deleted meanwhile
    if (step := step_of(folder)) >= 0:
        newest, copies = max(step, newest_step(record.path)), copies | {step: manifest}
        complete = {at: bool(its.get("rolling")) for at, its in copies.items() if its and at <= newest}
        for old in copies.keys() - to_keep(Path(run), complete, rotation):
            old_name = layout.checkpoint_path(Path(run), old).name
            if not remove(place, old_name) and old > newest and copies[old]:
                place.invalidate(old_name)  # a restore would choose it
    return time.monotonic() - began if is_new else 0.0


def remove(place: Place, name: str) -> bool:
    """Delete a folder at a place. If that fails, log one warning and return False.

    It is not tried again by this process, because every try would cost requests.
    """
    if name in _kept:
        return False
    try:
        place.remove(name)
    except Exception as error:  # of any file system of fsspec
        _kept.add(name)
        text = "%s at %s cannot be deleted (%s: %s). The run continues, but its copies need more space."
        logger.warning(text, name, place.name, type(error).__name__, in_a_line(error))
        return False
    return True

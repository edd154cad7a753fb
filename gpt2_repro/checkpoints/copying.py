"""Copy a run to another place while it trains (--sync_to).

The place has the layout of the run directory. A copy of a checkpoint is complete if its manifest, which is written
last, is intact.
"""

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Mapping
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
SMALL_FILES = (layout.ENVIRONMENT, layout.METRICS, layout.STATUS, layout.RECIPE, layout.SAMPLES, layout.CONSOLE)
PATIENCE = 1800.0  # seconds without a sign of progress after which a copy is given up
PLACE_SECONDS = 60.0  # in which the first copy of a new run should end
RETRIES = 1, 10  # seconds before each further try of the copies at the end of a run
LINE_SECONDS = 30.0  # between two lines while the end of the run waits for a copy
_kept: set[str] = set()  # the copies that this process could not delete


@dataclasses.dataclass(frozen=True)
class Job:
    """The arguments of `copy` after the place."""

    run_directory: str
    name: str
    rotation: Rotation
    identity: RunIdentity

    def to_json(self) -> dict[str, Any]:
        """Return the object to send to the process that copies."""
        document = dataclasses.asdict(self)
        document["identity"]["changeable"] = sorted(self.identity.changeable)
        return document

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> "Job":
        """Return the job for an object of `to_json` that was sent as JSON."""
        rotation = Rotation(*document["rotation"])
        identity = RunIdentity(**document["identity"])
        return cls(document["run_directory"], document["name"], rotation, identity)


class RunCopier:
    """Copies a run to another place while training continues, one folder at a time. Use it on rank 0 only.

    Args:
        rotation: which copies are kept.
    """

    def __init__(self, run: RunRecord, place: str, rotation: Rotation, identity: RunIdentity) -> None:
        self.run = run
        self.place = absolute(place)
        self.rotation = rotation
        self.identity = identity
        self.process = side_process.SideProcess(COPIER, self.place)
        self.job: str | None = None  # the folder that is being copied; "": only the small files
        self.done: set[str] = set()  # the copied folders
        self.signed_at = 0.0  # when the process last made progress
        self.requeue("")  # with an earlier attempt's checkpoints

    def requeue(self, *folders: str) -> None:
        """Queue the checkpoints that are not copied yet, newest first, and then `folders`. Earlier errors are forgotten."""
        self.failed = False  # whether a copy has failed since then
        self.error = ""  # why
        self.queue: list[str] = []
        for path in complete_checkpoints(self.run.path):
            if path.name not in self.done and path.name != self.job:
                self.queue.append(path.name)
        self.queue.extend(folders)

    def poll(self, seconds: float = 0.0) -> bool:
        """Start the next copy if none is in progress, and wait up to `seconds`. Return whether a copy has ended."""
        if self.job is None:
            if not self.queue:
                return False
            self._begin(self.queue.pop(0))
        reply = self.process.reply(seconds)
        if reply is not None:
            self.signed_at = time.monotonic()
        elif time.monotonic() - self.signed_at > PATIENCE:
            self.process.process.kill()
            reply = {"error": f"no progress for {PATIENCE / 60:.0f} minutes"}
        if not reply:
            return False
        self._end(reply)
        return True

    def _begin(self, name: str) -> None:
        """Let the process copy a folder of the run, or only the small files for ""."""
        self.job = name
        if self.process.process.poll() is not None:
            self.process = side_process.SideProcess(COPIER, self.place)
        job = Job(str(self.run.path.resolve()), name, self.rotation, self.identity)
        self.process.submit(job.to_json())
        self.signed_at = time.monotonic()

    def _end(self, reply: dict[str, Any]) -> None:
        """Log that the process has copied a folder, or why it could not."""
        name = self.job or ""
        self.job = None
        if "error" in reply:
            text = "NOT COPIED: %s to %s (%s). The next checkpoint or start retries."
            logger.warning(text, name or "the log", self.place, in_a_line(reply["error"]))
            self.failed = True
            self.error = str(reply["error"])
            self.queue = []
            return
        self.done.add(name)
        if reply["seconds"]:
            logger.info("copied %s to %s in %.1f s", name, self.place, reply["seconds"])

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
            if defect(self.run.final) is None:
                self.requeue(layout.FINAL, "")
            else:
                self.requeue("")
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

    def perform(document: dict[str, Any], progress: Callable[[], None]) -> dict[str, Any]:
        job = Job.from_json(document)
        place = Place(name, progress)
        seconds = copy(place, job.run_directory, job.name, job.rotation, job.identity)
        return {"seconds": seconds}

    side_process.serve(perform)


def require_own(place: Place, run_directory: Path, identity: RunIdentity, *, option: str = "--sync_to") -> None:
    """Raise UserError unless a place is empty or has a copy of the run with this identity.

    Also raise it if the place is the run directory itself, or if it has only the final model of a later step.
    """
    name = place.name
    saved = place.run_identity()
    if saved:
        identity.require_same(saved, where=name, option=option)
    elif place.names():
        raise UserError(f"{option} {name} is neither empty nor a copy of this run. Pass another {option}.")
    lock = run_directory / layout.LOCK
    with contextlib.suppress(FileNotFoundError):
        # The lock names the process that has locked the run directory.
        if lock.is_file() and lock.stat().st_size and place.read(layout.LOCK) == lock.read_bytes():
            raise UserError(f"{option} {name} is the run directory. Pass a folder on another disk.")
    step = place.manifest(layout.FINAL).get("step", 0)
    if step > last_step(RunRecord(run_directory)) and not place.manifests():
        raise UserError(f"{option} {name} has a final model of step {step}, but no checkpoint. Pass another {option}.")


def last_step(run: RunRecord) -> int:
    """Return the last step that a run has reached, also before it went back, or 0."""
    steps = abandoned(run.path)
    steps.add(newest_step(run.path))
    steps.add(run.status().step or 0)
    steps.add(read_manifest(run.final).get("step", 0))
    return max(steps)


def copy(place: Place, run_directory: str, name: str, rotation: Rotation, identity: RunIdentity) -> float:
    """Copy the small files of a run and its folder `name`, and return the seconds.

    If the folder has been copied before or is "", the result is 0. After a checkpoint, incomplete copies are deleted,
    those that the rotation does not keep, and those after the newest step of the run. A deletion that fails is a
    warning.

    Raises UserError, before anything is written, if the place belongs to another run (see `require_own`).
    """
    began = time.monotonic()
    run = RunRecord(run_directory)
    folder = Path(run_directory, name)
    require_own(place, run.path, identity)
    copies = place.manifests()
    _refuse_later_steps(copies, run)
    _copy_small_files(place, run.path)
    if not name:
        return 0.0
    manifest = read_manifest(folder)
    if not manifest:  # it may be deleted by now, if a newer checkpoint is complete
        return 0.0
    is_new = place.manifest(name) != manifest
    if is_new:
        try:
            _copy_folder(place, folder)
        except FileNotFoundError:
            if folder.is_dir():
                raise
            return 0.0  # deleted meanwhile
    step = step_of(folder)
    if step >= 0:  # a checkpoint
        copies[step] = manifest
        newest = max(step, newest_step(run.path))
        _rotate_copies(place, run.path, copies, newest, rotation)
    if not is_new:
        return 0.0
    return time.monotonic() - began


def _refuse_later_steps(copies: Mapping[int, Mapping[str, Any]], run: RunRecord) -> None:
    """Raise RunFailed if a place has a complete checkpoint of a step that this run has not reached."""
    reached = last_step(run)
    for step, manifest in copies.items():
        if manifest and step > reached:  # for example, the place could not be read at the start
            raise RunFailed(f"it has the newer step {step} of another start of this run")


def _copy_small_files(place: Place, run_directory: Path) -> None:
    for name in SMALL_FILES:
        path = run_directory / name
        if path.is_file():
            place.write(path.read_bytes(), name)  # not put: training appends to the originals


def _copy_folder(place: Place, folder: Path) -> None:
    """Copy a checkpoint or final/, its manifest last."""
    remove(place, folder.name)  # of an interrupted copy, or from before the run went back
    manifest = folder / CHECKPOINT_MANIFEST
    for path in sorted(folder.rglob("*")):
        is_copied = path.name != CHECKPOINT_MANIFEST and not path.name.startswith(SILLY_RENAME)
        if is_copied and path.is_file():
            place.put(path, f"{folder.name}/{path.relative_to(folder)}")
    place.put(manifest, f"{folder.name}/{CHECKPOINT_MANIFEST}")


def _rotate_copies(
    place: Place, run_directory: Path, copies: Mapping[int, Mapping[str, Any]], newest: int, rotation: Rotation
) -> None:
    """Delete the copies that the rotation does not keep, the incomplete ones, and those after the step `newest`.

    Args:
        copies: the manifests at the place by step, {} for an incomplete copy.
    """
    rolling: dict[int, bool] = {}
    for step, manifest in copies.items():
        if manifest and step <= newest:
            rolling[step] = bool(manifest.get("rolling"))
    kept = to_keep(run_directory, rolling, rotation)
    for step in copies.keys() - kept:
        name = layout.checkpoint_path(run_directory, step).name
        is_deleted = remove(place, name)
        if not is_deleted and step > newest and copies[step]:
            place.invalidate(name)  # a restore would choose it


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

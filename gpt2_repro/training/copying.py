"""Copy a run to another place while it trains (--sync_to).

The place has the layout of the run directory. A copy of a checkpoint is complete if its manifest, which is written
last, is intact.
"""

import logging
import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpt2_repro.errors import RunFailed, in_a_line
from gpt2_repro.run_record import RunRecord, checkpoints, layout, side_process
from gpt2_repro.run_record.layout import CHECKPOINT_MANIFEST, step_of
from gpt2_repro.run_record.place import Place, absolute, open_place


if TYPE_CHECKING:  # the process that copies imports this module, and these imports take a second
    from gpt2_repro.training.arguments import TrainingSection


logger = logging.getLogger(__name__)

COPIER = "import sys; from gpt2_repro.training import copying; copying.serve(sys.argv[1])"
SMALL_FILES = (layout.METRICS, layout.STATUS, layout.ENVIRONMENT, layout.RECIPE, layout.SAMPLES)
PATIENCE = 1800.0  # seconds without a sign of progress after which a copy is given up
LINE_SECONDS = 30.0  # between two lines while the end of the run waits for a copy


class RunCopier:
    """Copies a run to --sync_to while training continues, one checkpoint at a time. Use it on rank 0 only."""

    def __init__(self, run: RunRecord, settings: "TrainingSection") -> None:
        self.run, self.place, self.rules = run, absolute(settings.sync_to), rotation_of(settings)
        self.process: side_process.SideProcess | None = None
        self.job: str | None = None  # the folder that is being copied; "": only the small files
        self.done: set[str] = set()  # the copied folders
        self.failed: str | None = None  # the folder that could not be copied since the last checkpoint
        self.is_idle = False  # whether nothing is left to copy, or a copy has failed
        self.ends = False  # whether final/ and the last state of the small files are due
        self.signed_at = self.written_at = 0.0

    @property
    def step(self) -> int:
        """The step of the checkpoint that is being copied, or -1."""
        return step_of(Path(self.job or ""))

    def retry(self) -> None:
        """Copy again after a failure or a new checkpoint."""
        self.failed, self.is_idle = None, False

    def poll(self, seconds: float = 0.0) -> bool:
        """Start the next copy if none is in progress, and wait up to `seconds`. Return whether a copy has ended."""
        if self.job is None and not self.is_idle:
            self.job = self._next()
            self.is_idle = self.job is None
            if self.job is not None:
                if self.process is None or self.process.process.poll() is not None:
                    self.process = side_process.SideProcess(COPIER, self.place)
                self.process.submit({"run": str(self.run.path.resolve()), "name": self.job, "rules": self.rules})
                self.signed_at = time.monotonic()
        if self.job is None or self.process is None:
            return False
        reply = self.process.reply(seconds)
        if reply is None and time.monotonic() - self.signed_at > PATIENCE:
            self.process.process.kill()
            reply = {"error": f"no progress for {PATIENCE / 60:.0f} minutes"}
        if reply is not None:
            self.signed_at = time.monotonic()
        if not reply:
            return False
        if "error" in reply:
            text = "NOT COPIED: %s to %s (%s).%s"
            retry = "" if self.ends else " The next checkpoint retries."
            logger.warning(text, self.job or "the log", self.place, in_a_line(reply["error"]), retry)
            self.failed, self.job, self.is_idle = self.job, None, True
            return True
        if self.job and reply["seconds"]:
            logger.info("copied %s to %s in %.1f s", self.job, self.place, reply["seconds"])
        self.done.add(self.job)
        self.job = None
        return True

    def is_behind(self) -> bool:
        """Wait for a second. Return whether the complete run is not copied yet."""
        if not self.ends:
            self.ends, self.written_at = True, time.monotonic() - LINE_SECONDS + 2
            self.retry()
            self.done.discard("")
        self.poll(1.0)
        if self.job and time.monotonic() - self.written_at > LINE_SECONDS:
            self.written_at = time.monotonic()
            logger.info("waiting until %s is copied to %s", self.job, self.place)
        return not self.is_idle

    def require_copied(self) -> None:
        """Raise RunFailed if the last copy has failed."""
        if self.failed is not None:
            raise RunFailed(f"The run is not completely copied to {self.place}. Run the same command again to retry.")

    def _next(self) -> str | None:
        """Return the next folder to copy: the newest checkpoint, older ones, final/, and last the small files."""
        names = [path.name for path in checkpoints.complete_checkpoints(self.run.path)]
        names += [layout.FINAL] if self.ends and checkpoints.defect(self.run.final) is None else []
        return next((name for name in (*names, "") if name not in self.done), None)


def rotation_of(settings: "TrainingSection") -> dict[str, Any]:
    """Return the arguments of `checkpoints.to_keep`."""
    keep = {"keep": settings.keep_checkpoints, "keep_every": settings.keep_every_steps}
    return keep | {"keep_best": settings.keep_best_checkpoint}


def serve(name: str) -> None:
    """Perform the jobs of a RunCopier until the trainer ends."""
    side_process.end_with_parent()
    side_process.serve(lambda job, progress: {"seconds": copy(open_place(name, progress), **job)})


def copy(place: Place, run: str, name: str, rules: dict[str, Any]) -> float:
    """Copy the small files of a run and its folder `name`, and return the seconds.

    If the folder has been copied before or is "", the result is 0. After a checkpoint, old copies are deleted.
    """
    began, folder = time.monotonic(), Path(run, name)
    with tempfile.TemporaryDirectory() as still:  # training appends to the originals
        small = [file for file in SMALL_FILES if Path(run, file).is_file()]
        for file in small:
            shutil.copyfile(Path(run, file), Path(still, file))
        place.put(Path(still), "", small)
    if not name or not folder.is_dir():  # it may be deleted by now, if a newer checkpoint is complete
        return 0.0
    manifest = (folder / CHECKPOINT_MANIFEST).read_bytes()
    if is_new := place.read(f"{name}/{CHECKPOINT_MANIFEST}") != manifest:
        place.remove(name)  # of an interrupted copy, or from before the run went back
        files = [str(path.relative_to(folder)) for path in sorted(folder.rglob("*")) if path.is_file()]
        files = [file for file in files if not Path(file).name.startswith(checkpoints.SILLY_RENAME)]
        place.put(folder, name, [file for file in files if file != CHECKPOINT_MANIFEST])
        place.put(folder, name, [CHECKPOINT_MANIFEST])
    if (step := step_of(folder)) >= 0:
        rotate(place, Path(run), newest=max(step, RunRecord(run).newest_step()), **rules)
    return time.monotonic() - began if is_new else 0.0


def rotate(place: Place, run: Path, *, newest: int, **rules: Any) -> None:
    """Delete incomplete copies, those that the rules of the run do not keep, and those after the step `newest`."""
    copies = copies_at(place)
    complete = {
        step: bool(manifest.get("rolling")) for step, manifest in copies.items() if manifest and step <= newest
    }
    kept = checkpoints.to_keep(run, complete, **rules)
    for step in copies.keys() - kept:
        place.remove(layout.checkpoint_path(run, step).name)


def copies_at(place: Place) -> dict[int, dict[str, Any]]:
    """Return the manifests ({} if missing or damaged) of the checkpoints at a place, by step, newest first."""
    names = {step: name for name in place.names() if (step := step_of(Path(name))) >= 0}
    return {step: manifest_at(place, names[step]) for step in sorted(names, reverse=True)}


def manifest_at(place: Place, name: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, CHECKPOINT_MANIFEST).write_bytes(place.read(f"{name}/{CHECKPOINT_MANIFEST}"))
        return checkpoints.read_manifest(Path(folder))

"""Score each checkpoint of a run once while the run trains (evaluate.sh RUN --follow)."""

import contextlib
import dataclasses
import json
import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import yaml

from gpt2_repro.checkpoints.copying import SMALL_FILES
from gpt2_repro.checkpoints.manifest import read_manifest
from gpt2_repro.checkpoints.place import Place
from gpt2_repro.checkpoints.restoring import faults_in_words
from gpt2_repro.errors import BadCheckpoint, RunFailed, UserError, in_a_line
from gpt2_repro.evaluation.output import file_name
from gpt2_repro.files import from_json, parse_object, read_object, sha256_of, try_lock, write_whole
from gpt2_repro.model.checkpoint import Checkpoint, resolve_checkpoint
from gpt2_repro.run_record import RunRecord
from gpt2_repro.run_record.layout import (
    CHECKPOINT_MANIFEST,
    EVALUATION_FOLDER,
    FINAL,
    METRICS,
    RECIPE,
    STATUS,
    checkpoint_path,
)
from gpt2_repro.run_record.status import ENDED_STATES, RunStatus


logger = logging.getLogger(__name__)

START_SECONDS = 300.0  # longest wait for a run that does not exist yet
START_POLL_SECONDS = 1.0
SECONDS = 30.0  # between two looks at the run
# A supervised run that crashed may be started again for so long: the supervisor waits up to 5 minutes.
RESTART_SECONDS = 360.0
NICENESS = 10  # the training on the same machine comes first
OPTIONS = "options.json"  # what the scores of a checkpoint depend on
DELETED = "it was deleted"  # by the run, while it was read
SNAPSHOT = ".snapshot-"  # prefix of a folder with the files that are being scored
# The files that a model and its tokenizer are loaded from. Optimizer states have other names, or are in a folder.
LOADED = re.compile(r"[^/]+\.(safetensors|json|jinja|txt|model)")
# Errors of one checkpoint, after which the others are scored. torch raises RuntimeError if the memory is too small.
BAD = (BadCheckpoint, RunFailed, RuntimeError, MemoryError)


def follow(
    name: str, output: Path | None, score: Callable[[Checkpoint, Path], object], options: Mapping[str, Any]
) -> None:
    """Score the checkpoints of a run, the newest first, until all are scored and the run has ended.

    Rolling checkpoints are left out. The files of a checkpoint are linked or copied first, so that the run can delete
    it meanwhile. Nothing is written but the output folder and, for a URL, the log next to it.

    Args:
        name: a run directory, or the place of its copies (--sync_to).
        output: the folder of the scores, by default RUN/evaluation. For a URL it is evaluations/NAME/evaluation, and
            `report` can read evaluations/NAME.
        score: a function that scores a checkpoint, and writes comparison.json to a folder. For a checkpoint that
            cannot be scored it raises one of BAD. A UserError of another kind ends the command.
        options: the options that the scores depend on, as JSON values. With other options, scores are computed again.

    Raises UserError if there is no run, or if the output folder is used by another process or has scores of another
    run. Raises RunFailed at the end if a checkpoint could not be scored.
    """
    place = Place(name, option="--follow")
    _wait_for_run(place)
    run_directory = Path("evaluations", file_name(name))
    if place.is_local:
        run_directory = Path(place.root)
    follower = Follower(place, output or run_directory / EVALUATION_FOLDER, score, options)
    os.nice(NICENESS)
    with _locked(follower.folder) as mark:
        while True:
            try:
                with faults_in_words(name):
                    _require_same_run(place, mark)
                    if not place.is_local and output is None:
                        _read(place, run_directory, *SMALL_FILES)
                    ending = follower.ending()  # before the list of checkpoints, which is then complete
                    new = follower.new_checkpoints()
                if new:
                    follower.score_newest(new)
                    continue
                if ending is not None:
                    break
                follower.announce_wait()
            except RunFailed as error:  # the place cannot be read
                logger.warning("%s", error)
            time.sleep(SECONDS)
        follower.finish(ending)


def _wait_for_run(place: Place) -> None:
    """Wait until a place has a run, because the training may have been started at the same time."""
    deadline = time.monotonic() + START_SECONDS
    is_announced = False
    while True:
        with faults_in_words(place.name):
            names = place.names()
        if set(SMALL_FILES) & set(names):
            return
        has_other_files = any(not name.startswith(".") for name in names)
        if has_other_files or time.monotonic() > deadline:
            raise UserError(f"{place.name} has no run. Start the training first.")
        if not is_announced:
            logger.info("waiting for a run in %s, for at most %.0f minutes", place.name, START_SECONDS / 60)
            is_announced = True
        time.sleep(START_POLL_SECONDS)


@dataclasses.dataclass
class Follower:
    """The checkpoints of a run at `place`, and their scores in `folder` (see `follow`)."""

    place: Place
    folder: Path
    score: Callable[[Checkpoint, Path], object]
    options: Mapping[str, Any]
    tried: set[str] = dataclasses.field(default_factory=set)  # hashes of the manifests, each tried once
    problems: dict[str, str] = dataclasses.field(default_factory=dict)  # why a checkpoint is not scored, by its name
    is_waiting: bool = False

    def ending(self) -> str | None:
        """Return how the run has ended, or None if it may continue."""
        recorded = parse_object(_content(self.place, STATUS)) or {}
        status = from_json(RunStatus, recorded, default=RunStatus())
        was_killed = self.place.is_local and RunRecord(self.place.root).was_killed()
        state = "killed" if was_killed else status.state
        if state not in (*ENDED_STATES, "killed"):
            return None
        # The supervisor restarts a run that crashed. The files at another place arrive after the status.
        may_continue = status.is_supervised and state in ("failed", "killed")
        if (may_continue or not self.place.is_local) and status.age() < RESTART_SECONDS:
            return None
        return state

    def new_checkpoints(self) -> dict[str, dict[str, Any]]:
        """Return the manifests of the checkpoints that are neither scored with these options nor tried, newest first.

        Rolling checkpoints and incomplete ones are left out.
        """
        of_steps = self.place.manifests()
        manifests = {FINAL: self.place.manifest(FINAL)}
        for step, manifest in of_steps.items():
            manifests[checkpoint_path(Path(), step).name] = manifest
        new: dict[str, dict[str, Any]] = {}
        options = self._all_options()
        for name, manifest in manifests.items():
            if not manifest or manifest.get("rolling") or manifest["sha256"] in self.tried:
                continue
            scores = self.folder / name
            if read_manifest(scores) != manifest or read_object(scores / OPTIONS) != options:
                new[name] = manifest
        return new

    def _all_options(self) -> dict[str, Any]:
        """Return everything that the scores depend on, apart from the checkpoint."""
        try:
            sections = yaml.safe_load(_content(self.place, RECIPE))
        except yaml.YAMLError:
            sections = None
        recipe = sections.get("evaluation") if isinstance(sections, dict) else None
        return {"options": dict(self.options), "recipe": recipe}

    def score_newest(self, new: Mapping[str, dict[str, Any]]) -> None:
        """Score the first of some checkpoints. If that fails, the reason is a warning.

        Raises RunFailed if the place cannot be read.
        """
        name = list(new)[0]
        manifest = new[name]
        self.is_waiting = False
        with tempfile.TemporaryDirectory(dir=self.folder, prefix=SNAPSHOT) as scratch:
            run_directory = Path(scratch)
            with faults_in_words(self.place.name):
                problem = _take(self.place, name, manifest, run_directory)
            if not problem:
                problem = self._score_copy(name, manifest, run_directory)
        self.tried.add(manifest["sha256"])
        self.problems.pop(name, None)
        if not problem:
            return
        logger.warning("%s is not scored: %s", name, problem)
        if problem != DELETED:
            self.problems[name] = problem

    def _score_copy(self, name: str, manifest: dict[str, Any], run_directory: Path) -> str | None:
        """Score the copy of a checkpoint in the folder `run`, or return why it cannot be scored."""
        scores = self.folder / name
        options = self._all_options()
        write_whole(run_directory / name / CHECKPOINT_MANIFEST, json.dumps(manifest))
        (scores / OPTIONS).unlink(missing_ok=True)
        try:
            checkpoint = self._open(name, run_directory)
            self.score(checkpoint, scores)
        except BAD as error:
            return in_a_line(error)
        write_whole(scores / OPTIONS, json.dumps(options))
        write_whole(scores / CHECKPOINT_MANIFEST, json.dumps(manifest))
        return None

    def _open(self, name: str, run_directory: Path) -> Checkpoint:
        try:
            checkpoint = resolve_checkpoint(str(run_directory / name))
        except UserError as error:
            raise BadCheckpoint(str(error)) from None
        title = f"{name} ({self.place.name})"
        source = f"{self.place.name.rstrip('/')}/{name}"
        return dataclasses.replace(checkpoint, name=title, source=source, copy=checkpoint.source)

    def announce_wait(self) -> None:
        if not self.is_waiting:
            logger.info("No new checkpoint. Waiting for the run to save one, or to end.")
        self.is_waiting = True

    def finish(self, ending: str) -> None:
        """Report the end. Raises RunFailed if a checkpoint could not be scored."""
        if self.problems:
            problems = "; ".join(f"{name} ({problem})" for name, problem in self.problems.items())
            raise RunFailed(f"Not scored: {problems}. Run the same command again to try it again.")
        logger.info("The run has ended (%s), and its checkpoints are scored: %s", ending, self.folder)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[BinaryIO]:
    """Lock the output folder, delete what a killed process has left there, and yield the lock file."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".following").open("a+b") as lock:
        if not try_lock(lock.fileno(), folder):
            raise UserError(f"Another evaluate.sh --follow writes to {folder}. Pass another --output_dir.")
        for leftover in folder.glob(f"{SNAPSHOT}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        yield lock


def _require_same_run(place: Place, mark: BinaryIO) -> None:
    """Raise UserError if the lock file names another run, otherwise write the run to it.

    The same run has the same identity, also if it was started again, or the same first event (which has its time), also
    if it continued with changed settings.
    """
    event = _content(place, METRICS).partition(b"\n")[0].decode(errors="replace")
    identity = place.run_identity()
    if not identity and not event:
        return  # nothing is written yet
    mark.seek(0)
    scored = parse_object(mark.read()) or {}
    has_same_identity = bool(identity) and identity == scored.get("run_identity")
    has_same_event = bool(event) and event == scored.get("first_event")
    if "run_identity" in scored and not has_same_identity and not has_same_event:
        raise UserError(f"{Path(mark.name).parent} has scores of another run. Pass another --output_dir.")
    this_run = {"run_identity": identity, "first_event": event}
    if scored != this_run:
        mark.truncate(0)
        mark.write(json.dumps(this_run).encode())
        mark.flush()


def _content(place: Place, name: str) -> bytes:
    """Return the content of a file, or b"" if it is missing."""
    with contextlib.suppress(FileNotFoundError):
        return place.read(name)
    return b""


def _read(place: Place, folder: Path, *names: str) -> None:
    """Copy small files, if they exist."""
    for name in names:
        content = _content(place, name)
        if content:
            write_whole(folder / name, content)


def _take(place: Place, name: str, manifest: dict[str, Any], run_directory: Path) -> str | None:
    """Link or copy what the model and the log need to the folder `run`, or return why that is impossible."""
    for file in filter(LOADED.fullmatch, manifest["files"]):
        try:
            sha256 = _fetch(place, f"{name}/{file}", run_directory / name / file)
        except FileNotFoundError:
            return f"{file} is missing" if place.manifest(name) == manifest else DELETED
        if sha256 != manifest["files"][file]["sha256"]:
            return f"{file} is damaged"
    _read(place, run_directory, *SMALL_FILES)
    return None


def _fetch(place: Place, name: str, target: Path) -> str:
    """Link or copy a file, and return its SHA-256. Raises FileNotFoundError if it is missing."""
    target.parent.mkdir(exist_ok=True)
    if place.is_local:
        with contextlib.suppress(OSError):  # another file system
            target.hardlink_to(Path(place.root, name))
            return sha256_of(target)
    return place.get(name, target)

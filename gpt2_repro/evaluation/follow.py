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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from gpt2_repro import checkpoints
from gpt2_repro.checkpoints.checkpoint import Checkpoint, resolve_checkpoint
from gpt2_repro.checkpoints.copying import SMALL_FILES
from gpt2_repro.checkpoints.place import Place
from gpt2_repro.checkpoints.restoring import faults_in_words
from gpt2_repro.errors import RunFailed, UserError
from gpt2_repro.evaluation.output import file_name
from gpt2_repro.files import parse_object, sha256_of, try_lock, write_whole
from gpt2_repro.run_record.layout import (
    CHECKPOINT_MANIFEST,
    EVALUATION_FOLDER,
    FINAL,
    METRICS,
    STATUS,
    checkpoint_path,
)


logger = logging.getLogger(__name__)

SECONDS = 30.0  # between two looks at the run
NICENESS = 10  # the training on the same machine comes first
SNAPSHOT = ".snapshot-"  # prefix of a folder with the files that are being scored
# The files that a model and its tokenizer are loaded from. Optimizer states have other names, or are in a folder.
LOADED = re.compile(r"[^/]+\.(safetensors|json|jinja|txt|model)")


def follow(name: str, output: Path | None, score: Callable[[Checkpoint, Path], object]) -> None:
    """Score the checkpoints of a run, the newest first, until all are scored and the run is complete.

    Rolling checkpoints are left out. The files of a checkpoint are linked or copied first, so that the run can delete
    it meanwhile. Nothing is written but the output folder and, for a URL, the log next to it.

    Args:
        name: a run directory, or the place of its copies (--sync_to).
        output: the folder of the scores, by default RUN/evaluation. For a URL it is evaluations/NAME/evaluation, and
            `report` can read evaluations/NAME.
        score: a function that scores a checkpoint, and writes comparison.json to a folder.

    Raises UserError if there is no run, or if the output folder is used by another process or has scores of another
    run.
    """
    place = Place(name, option="--follow")
    with faults_in_words(name):
        if not set(SMALL_FILES) & set(place.names()):
            raise UserError(f"{name} has no run. Start the training first.")
    run = Path(place.root) if place.is_local else Path("evaluations", file_name(name))
    folder, seen = output or run / EVALUATION_FOLDER, set[str]()
    os.nice(NICENESS)
    with _locked(folder) as mark:
        while True:
            try:
                with faults_in_words(name):
                    _require_same_run(place, mark)
                    if not place.is_local and output is None:
                        _read(place, run, *SMALL_FILES)
                    is_complete = (parse_object(_content(place, STATUS)) or {}).get("state") == "complete"
                    found = _manifests(place)
                scored = {at for at, manifest in found.items() if checkpoints.read_manifest(folder / at) == manifest}
                new = [at for at, manifest in found.items() if at not in scored and manifest["sha256"] not in seen]
                if not new and is_complete:
                    return logger.info("The run is complete, and its checkpoints are scored: %s", folder)
                if new:
                    _score(place, new[0], found[new[0]], folder, score)
                    seen.add(found[new[0]]["sha256"])
                    continue
            except RunFailed as error:
                logger.warning("%s", error)
            time.sleep(SECONDS)


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
    """Raise UserError if the lock file names another run. A new one gets the run's first event, which has its time."""
    first = _content(place, METRICS).partition(b"\n")[0]
    mark.seek(0)
    if (scored := mark.read()) and first and scored != first:
        raise UserError(f"{Path(mark.name).parent} has scores of another run. Pass another --output_dir.")
    if not scored:
        mark.write(first)
        mark.flush()


def _content(place: Place, name: str) -> bytes:
    """Return the content of a file, or b"" if it is missing."""
    with contextlib.suppress(FileNotFoundError):
        return place.read(name)
    return b""


def _read(place: Place, folder: Path, *names: str) -> None:
    """Copy small files, if they exist."""
    for name in names:
        if content := _content(place, name):
            write_whole(folder / name, content)


def _manifests(place: Place) -> dict[str, dict[str, Any]]:
    """Return the manifests of final/ and of all complete checkpoints that are not rolling, newest first."""
    steps = {checkpoint_path(Path(), step).name: manifest for step, manifest in place.manifests().items()}
    found = {FINAL: place.manifest(FINAL), **steps}
    return {name: manifest for name, manifest in found.items() if manifest and not manifest.get("rolling")}


def _score(
    place: Place, name: str, manifest: dict[str, Any], folder: Path, score: Callable[[Checkpoint, Path], object]
) -> None:
    """Score a checkpoint, unless it is damaged, or deleted before its files are linked or copied."""
    with tempfile.TemporaryDirectory(dir=folder, prefix=SNAPSHOT) as scratch:
        run = Path(scratch)
        with faults_in_words(place.name):
            if defect := _take(place, name, manifest, run):
                return logger.warning("%s is not scored: %s", name, defect)
        write_whole(run / name / CHECKPOINT_MANIFEST, json.dumps(manifest))
        checkpoint, source = resolve_checkpoint(str(run / name)), f"{place.name.rstrip('/')}/{name}"
        title = f"{name} ({place.name})"
        score(dataclasses.replace(checkpoint, name=title, source=source, copy=checkpoint.source), folder / name)
        write_whole(folder / name / CHECKPOINT_MANIFEST, json.dumps(manifest))


def _take(place: Place, name: str, manifest: dict[str, Any], run: Path) -> str | None:
    """Link or copy what the model and the log need to the folder `run`, or return why that is impossible."""
    try:
        for file in filter(LOADED.fullmatch, manifest["files"]):
            if _fetch(place, f"{name}/{file}", run / name / file) != manifest["files"][file]["sha256"]:
                return f"{file} is damaged"
    except FileNotFoundError:
        return "it was deleted"
    _read(place, run, *SMALL_FILES)
    return None


def _fetch(place: Place, name: str, target: Path) -> str:
    """Link or copy a file, and return its SHA-256. Raises FileNotFoundError if it is missing."""
    target.parent.mkdir(exist_ok=True)
    if place.is_local:
        with contextlib.suppress(OSError):  # another file system
            target.hardlink_to(Path(place.root, name))
            return sha256_of(target)
    return place.get(name, target)

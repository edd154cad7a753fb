"""Read and write the files that record a run, and lock its run directory."""

import contextlib
import fcntl
import logging
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TextIO

import psutil
import yaml

from gpt2_repro.errors import UserError
from gpt2_repro.files import from_json, growth, read_object, sync, to_json, try_lock, write_whole
from gpt2_repro.manifest import MANIFEST
from gpt2_repro.run_record import events, layout
from gpt2_repro.run_record.environment import Environment
from gpt2_repro.run_record.notes import is_supervised
from gpt2_repro.run_record.status import RunStatus, process_seconds, time_of_earlier_attempts
from gpt2_repro.run_record.time_breakdown import PARTS, STEPS, goodput
from gpt2_repro.text import now


logger = logging.getLogger(__name__)

WRITING = 60.0  # seconds without progress after which the writer of an ended job is not waited for
FRESH = 30.0  # seconds between two status updates while a run is running
HOLDER = "process {} on {}"


class RunRecord:
    """The files of a run directory. Damaged files read as empty. Only rank 0 writes."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.final = self.path / layout.FINAL
        self.metrics = self.path / layout.METRICS
        self.samples = self.path / layout.SAMPLES
        self._measure: Callable[[], Mapping[str, float]] = lambda: {"startup": process_seconds()}
        self._lock: TextIO | None = None
        self.lock_descriptor = -1  # of the lock file, if this process has locked the run
        self._holder_before: str | None = None  # content of the lock file before `lock`. None: there was no file
        self._created: list[Path] = []  # the folders that `lock` has created, the innermost first
        self.is_claimed = False  # whether this job trains the run
        self._earlier = dict.fromkeys(PARTS, 0.0)  # seconds of earlier attempts
        self.written = 0.0  # when run_status.json was written last, of time.monotonic()
        self.startup: dict[str, float] = {}  # seconds of each phase of the start, in order

    # Reading

    def recipe_text(self) -> str:
        """Return recipe.yaml, or "" if the file is missing."""
        path = self.path / layout.RECIPE
        if not path.is_file():
            return ""
        return path.read_text(encoding="utf-8", errors="replace")

    def recipe(self) -> dict[str, Any]:
        """Return the sections in recipe.yaml, or {} if the file is missing or damaged."""
        try:
            sections = yaml.safe_load(self.recipe_text())
        except (yaml.YAMLError, ValueError, RecursionError):
            return {}
        if not isinstance(sections, dict):
            return {}
        return sections

    def environment(self) -> Environment:
        """Return environment.json, or an empty Environment if missing or damaged."""
        document = read_object(self.path / layout.ENVIRONMENT)
        return from_json(Environment, document, default=Environment())

    def status(self) -> RunStatus:
        """Return run_status.json, or an empty RunStatus if missing or damaged."""
        document = read_object(self.path / layout.STATUS)
        losses: dict[str, float] = {}
        for key, value in document.items():
            if key.endswith(events.LOSSES) and events.is_number(value):
                losses[key] = value
        document["losses"] = losses
        return from_json(RunStatus, document, default=RunStatus())

    def data_folder(self, option: str) -> Path | None:
        """Return the prepared folder of the run, or None if it is unknown or does not exist.

        Raises UserError, which names `option`, if the folder now has other rows.
        """
        section = self.recipe().get("data", {})
        name = section.get("dataset_dir")
        if not name or not Path(name).is_dir():
            return None
        trained = self.environment().data.get("sha256")
        manifest = read_object(Path(name, MANIFEST))
        current = manifest.get("sha256")
        if trained and current and trained != current:
            problem = f"{name} was prepared again after {self.path} was trained, so {self.path} may know its text"
            raise UserError(f"{problem}. Pass {option} {name} to score it nevertheless.")
        return Path(name)

    def damaged(self) -> Path | None:
        """Return the first damaged .yaml or .json file of the run, or None."""
        recipe = self.path / layout.RECIPE
        if recipe.is_file() and not self.recipe():
            return recipe
        for path in (self.path / layout.ENVIRONMENT, self.path / layout.STATUS):
            if path.is_file() and not read_object(path):
                return path
        return None

    def holder(self) -> str:
        """Return the process that has locked the run, or that had locked it last, such as `process 7 on HOST`."""
        path = self.path / layout.LOCK
        if not path.is_file():
            return ""
        return path.read_text(encoding="utf-8", errors="replace").strip()

    def process(self) -> Literal["alive", "ended", "unknown"]:
        """Return whether the process that trains the run is alive.

        This is unknown on another machine, in a folder without a lock file, and on a file system without locks.
        """
        holder = self.holder()
        lock = self._lock_state()
        if lock == "free" or (lock == "held" and _has_ended(holder)):
            return "ended"
        if lock == "held":
            return "alive"
        return "unknown"

    def was_killed(self) -> bool:
        """Return whether a running run has ended without an entry in run_status.json.

        Its process and the writer of its last checkpoint have ended. The result is False if this is unknown.
        """
        return self.status().state == "running" and self._lock_state() == "free"

    def _lock_state(self) -> Literal["free", "held", "unknown"]:
        """Return whether a process of this machine, which had locked the run, or its writer still has the lock."""
        if not _is_from_here(self.holder()):
            return "unknown"
        with (self.path / layout.LOCK).open("rb") as file:
            try:
                # The process and the writer of its last checkpoint have an exclusive lock.
                fcntl.flock(file.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return "held"
            except OSError:
                return "unknown"
        return "free"

    # Writing

    def lock(self) -> None:
        """Lock the run directory, which is created if it is missing.

        Raises UserError if another job has locked it.
        """
        if self._lock is not None:
            return
        path = self.path / layout.LOCK
        missing = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
        file = None
        while file is None:
            is_new = not path.exists()
            file = self._open_and_lock(path)
            is_current = path.exists() and os.path.samestat(path.stat(), os.fstat(file.fileno()))
            if not is_current:
                file.close()  # the job that had locked the file was refused, and has deleted it
                file = None
        file.seek(0)
        self._holder_before = None
        if not is_new:
            self._holder_before = file.read()
        self._created = missing
        file.truncate(0)
        file.write(HOLDER.format(os.getpid(), platform.node()))
        file.flush()
        self._lock = file
        self.lock_descriptor = file.fileno()
        self._earlier = time_of_earlier_attempts(self.status())

    def _open_and_lock(self, path: Path) -> TextIO:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            file = path.open("a+", encoding="utf-8")
        except OSError as error:
            raise UserError(f"--output_dir {self.path} cannot be written ({error.strerror}).") from None
        grows = growth(self.path / layout.STAGING)
        deadline = time.monotonic() + WRITING
        while not try_lock(file.fileno(), self.path):
            file.seek(0)
            holder = file.read().strip() or "unknown"
            # If the job has ended, its writer still writes the last checkpoint.
            if not _has_ended(holder) or time.monotonic() > deadline:
                raise UserError(f"{self.path} is in use by {holder}. End that job, or pass another --output_dir.")
            if grows():
                deadline = time.monotonic() + WRITING
            time.sleep(0.1)
        return file

    def unlock(self) -> None:
        """Unlock the run directory, if this process has locked it. Undo `lock`, unless the run was claimed."""
        if self._lock is None:
            return
        if not self.is_claimed:
            self._undo_lock(self._lock)
        self._lock.close()
        self._lock = None
        self.lock_descriptor = -1

    def _undo_lock(self, file: TextIO) -> None:
        if self._holder_before is None:
            (self.path / layout.LOCK).unlink(missing_ok=True)
        else:
            file.truncate(0)
            file.write(self._holder_before)
            file.flush()
        for folder in self._created:
            with contextlib.suppress(OSError):  # it has files by now
                folder.rmdir()

    @contextlib.contextmanager
    def unchanged_until_claimed(self) -> Iterator[None]:
        """Unlock the run directory when the context ends, so that this process can train the run again.

        Before `claim`, undo `lock`. The writer of the last checkpoint keeps its own lock.
        """
        try:
            yield
        finally:
            self.unlock()

    def claim(self, recipe: str) -> None:
        """Lock the run directory, write recipe.yaml and set the state to "running"."""
        self.lock()
        self.is_claimed = True
        write_whole(self.path / layout.RECIPE, recipe)
        self.write_status("running", reason=None)

    def join(self) -> None:
        """Note that rank 0 has claimed the run. Called on all ranks."""
        self.is_claimed = True

    def write_environment(self, environment: Environment) -> None:
        text = to_json(environment.to_json(), indent=2)
        write_whole(self.path / layout.ENVIRONMENT, text + "\n")

    def write_status(self, state: str, **values: Any) -> None:
        """Update `state`, `values` and the time breakdown in run_status.json."""
        parts = self.time_breakdown()
        written = {
            "state": state,
            "seconds": round(sum(parts.values()), 2),
            "time_breakdown": parts,
            "goodput": round(goodput(parts), 4),
            "updated": now(),
            "is_supervised": is_supervised(),
        }
        path = self.path / layout.STATUS
        self.written = time.monotonic()
        try:
            document = read_object(path)
            document.update(values)
            document.update(written)
            text = to_json(document, indent=2)
            write_whole(path, text + "\n")
        except OSError as error:
            logger.warning("Could not update %s (%s). The run continues.", path, error.strerror)

    def replace_running(self, state: str, reason: str) -> None:
        """Set `state` and `reason` in run_status.json if the state is still "running".

        For a machine without rank 0, which does not know the times of the run.
        """
        path = self.path / layout.STATUS
        try:
            document = read_object(path)
            if document.get("state") == "running":
                document.update(state=state, reason=reason)
                text = to_json(document, indent=2)
                write_whole(path, text + "\n")
        except OSError as error:
            logger.warning("Could not update %s (%s).", path, error.strerror)

    def reached(self) -> int:
        """Return the last step that earlier attempts have recorded, 0 without one."""
        return max(self.status().step or 0, events.last_step(self.metrics))

    def rewind(self, step: int, *, validates_again: bool = False) -> None:
        """Delete the events after `step`, and the validation at `step` if it is repeated."""
        for path in (self.metrics, self.samples):
            events.rewind(path, step, validates_again=validates_again)

    def sync(self) -> None:
        """Wait until metrics.jsonl and samples.jsonl are on disk."""
        for path in (self.metrics, self.samples):
            if path.is_file():
                sync(path)

    # Time

    def end_phase(self, name: str) -> None:
        """Add to a phase of the start the time since the end of the previous phase."""
        earlier = sum(self.startup.values())
        seconds = max(0.0, round(process_seconds() - earlier, 2))
        self.startup[name] = self.startup.get(name, 0.0) + seconds

    def seconds(self) -> float:
        """Return the duration of all attempts of this run in seconds."""
        # From the start of the process, because a rented machine costs money from then on.
        return sum(self._earlier.values()) + process_seconds()

    def measure_with(self, time_breakdown: Callable[[], Mapping[str, float]]) -> None:
        """Take the times of this process from a function that returns its seconds in each part of PARTS."""
        self._measure = time_breakdown

    def time_breakdown(self) -> dict[str, float]:
        """Return the seconds of each part of PARTS, summed over all attempts."""
        measured = self._measure()
        parts: dict[str, float] = {}
        for name in PARTS:
            parts[name] = round(self._earlier[name] + measured.get(name, 0.0), 2)
        return parts

    def add_redone_steps(self, step: int, at_checkpoint: Mapping[str, float]) -> None:
        """Count the time of steps that earlier attempts trained after `step` as redone.

        `at_checkpoint` is the time breakdown in the manifest of the checkpoint at `step`, or {} at step 0.
        """
        for name in PARTS:  # run_status.json may be damaged
            self._earlier[name] = max(self._earlier[name], at_checkpoint.get(name, 0.0))
        if self.reached() <= step:
            return
        for name in STEPS:
            kept = at_checkpoint.get(name, 0.0)
            lost = max(0.0, self._earlier[name] - kept)
            self._earlier[name] -= lost
            self._earlier["redone"] += lost


def _process_of(holder: str) -> str:
    """Return the process id in a text like HOLDER."""
    return holder.partition(" on ")[0].removeprefix("process ")


def _is_from_here(holder: str) -> bool:
    """Return whether a text like HOLDER names a process of this machine."""
    number = _process_of(holder)
    return holder == HOLDER.format(number, platform.node())


def _has_ended(holder: str) -> bool:
    """Return whether the process of a text like HOLDER ran here and has ended."""
    number = _process_of(holder)
    if not _is_from_here(holder) or not number.isdigit():
        return False
    return not psutil.pid_exists(int(number))

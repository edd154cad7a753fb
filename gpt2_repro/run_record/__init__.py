"""The run directory is the record of a run: who writes it, what it is, how far it is, what it measured."""

import contextlib
import datetime
import fcntl
import json
import logging
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TextIO

from gpt2_repro.errors import UserError
from gpt2_repro.files import append_line, parse_event, read_lines, read_object, sync, write_whole
from gpt2_repro.recipe import load_sections
from gpt2_repro.run_record import checkpoints
from gpt2_repro.supervision import SINCE, noted
from gpt2_repro.time_breakdown import ACCOUNTS
from gpt2_repro.training.meter import STEPS, process_seconds


logger = logging.getLogger(__name__)

STATUS = "run_status.json"
ENVIRONMENT = "environment.json"
EVENTS = ("metrics.jsonl", "samples.jsonl")
# Fields that --allow_resume_change may override. The others decide states or shapes of the checkpoint; of
# tokens_per_step it is the position in the order of rows, which is counted in steps.
CHANGEABLE = {
    *("data", "max_steps", "bf16", "seed", "data_seed", "train_sampling_strategy", "dropout"),
    *("learning_rate", "warmup_steps", "final_learning_rate_fraction", "max_grad_norm", "skip_loss_z", "skip_grad_z"),
    *("lr_scheduler_type", "decay_fraction"),
}
FRESH = 30.0  # seconds for which a status is left as it is while the run goes on
PACKAGES = ("torch", "transformers", "accelerate", "deepspeed", "datasets", "tokenizers", "flash-attn")


class RunDirectory:
    """`runs/<name>/`. Only rank 0 writes; `lock` keeps a second job out."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self._lock: TextIO | None = None
        self._earlier = dict.fromkeys(ACCOUNTS, 0.0)  # seconds of earlier attempts
        self._written = 0.0
        self.book: Callable[[], dict[str, float]] = lambda: {"startup": process_seconds()}  # those of this process

    def check_owner(self) -> None:
        """Raise UserError if the directory has files, but none that proves that train.py made it.

        Any one proof is enough: a power cut may have emptied the others. Hidden files do not count.
        """
        if not self.path.is_dir() or not any(not path.name.startswith(".") for path in self.path.iterdir()):
            return
        recipe = self.path / "recipe.yaml"
        proofs = [self.read_status().get("state"), read_object(self.path / ENVIRONMENT).get("run_identity")]
        proofs += [checkpoints.read_manifest(path).get("run_identity") for path in checkpoints.checkpoints(self.path)]
        with contextlib.suppress(UserError, UnicodeDecodeError):
            proofs.append(recipe.is_file() and load_sections(recipe).get("training"))
        if not any(proofs):
            told = f"{self.path} holds files and is not a run directory of train.py."
            raise UserError(f"{told} Pass an --output_dir that is new, empty or a run to resume.")

    def lock(self) -> None:
        """Hold the directory until this process ends. Raises UserError where another job holds it."""
        if self._lock is not None:
            return
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = (self.path / ".lock").open("a+")
        except OSError as error:
            raise UserError(f"cannot write into {self.path} ({error.strerror}): name another --output_dir") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.seek(0)
            holder = lock.read().strip() or "unknown"
            raise UserError(f"{self.path} is being written by {holder}: end it or name another --output_dir") from None
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {platform.node()}")
        lock.flush()
        self._lock = lock
        self._earlier = _accounts_before(self.read_status())

    def claim(self, recipe: str) -> None:
        """Hold the directory as `lock` does, and write down what is run in it."""
        self.lock()
        write_whole(self.path / "recipe.yaml", recipe)
        self.write_status("running", reason=None)

    def seconds(self) -> float:
        """What the run has taken so far, from the start of this process and in the attempts before: all of it was paid."""
        return sum(self._earlier.values()) + process_seconds()

    def accounts(self) -> dict[str, float]:
        """Return the same seconds by the keys of `time_breakdown.ACCOUNTS`."""
        booked = self.book()
        return {name: round(self._earlier[name] + booked.get(name, 0.0), 2) for name in ACCOUNTS}

    def book_redone_steps(self, step: int, at_checkpoint: Mapping[str, float]) -> None:
        """Move the time of steps that will be repeated to the account of redone steps.

        Args:
            step: where this attempt starts.
            at_checkpoint: the accounts when its checkpoint was saved, {} at step 0.
        """
        if self.read_status().get("step", 0) > step:
            for name in STEPS:
                lost = max(0.0, self._earlier[name] - at_checkpoint.get(name, 0.0))
                self._earlier[name] -= lost
                self._earlier["redone"] += lost

    def is_finished(self, steps: int) -> bool:
        """Return whether the run is complete, `final/` has all its files, and it was planned for this many steps.

        An extended run counts by its first plan, too.
        """
        if self.read_status().get("state") != "complete" or self.final_defect() is not None:
            return False
        manifest = checkpoints.read_manifest(self.path / "final")
        return steps in (manifest["step"], manifest["environment"]["run_identity"]["max_steps"])

    def final_defect(self) -> str | None:
        """Return why `final/` is not complete, by its manifest and the sizes of its files, or None."""
        return checkpoints.defect(self.path / "final", read_files=False)

    def check_identity(self, run_identity: dict[str, Any], *, allow_change: bool = False) -> None:
        """Raise UserError where this directory belongs to another run than the one that is asked for."""
        if saved := read_object(self.path / ENVIRONMENT).get("run_identity"):
            refuse_another_run(saved, run_identity, where=self.path, allow_change=allow_change)

    def rewind(self, step: int, *, validates_again: bool = False) -> None:
        """Drop the events after `step`, and the validation at `step` if it is repeated. Damaged lines go too."""
        for name in EVENTS:
            path = self.path / name
            if path.is_file():
                kept = [line for line in read_lines(path) if _stays(parse_event(line), step, validates_again)]
                write_whole(path, "".join(f"{line}\n" for line in kept))

    def validation_losses(self, step: int | None = None) -> dict[str, float]:
        """Return the losses by name of the last validation, or of the one at `step`; {} if there was none."""
        losses: dict[str, float] = {}
        for event in (parse_event(line) or {} for line in read_lines(self.path / EVENTS[0])):
            if "eval_loss" in event and step in (None, event.get("step")):
                losses |= {key: value for key, value in event.items() if key.endswith("_loss")}
        return losses

    def read_status(self) -> dict[str, Any]:
        """Return the last written status, {} before the first or if the file is damaged."""
        return read_object(self.path / STATUS)

    def write_status(self, state: str, **values: Any) -> None:
        """Record the state: running, complete, stopped, failed or diverged. Values of earlier calls stay."""
        accounts = self.accounts()
        seconds = round(sum(accounts.values()), 2)
        told = {"state": state, "seconds": seconds, "accounts": accounts, "updated": now()}
        status = self.read_status() | values | told
        self._written = time.monotonic()
        try:
            self.write_json(STATUS, status)
        except OSError as error:  # a full disk ends a run where nothing can be saved, not where nothing can be said
            logger.warning("%s is not up to date (%s)", self.path / STATUS, error.strerror)

    def is_stale(self) -> bool:
        """Whether the status is older than it should be while the run goes on."""
        return time.monotonic() - self._written > FRESH

    def sync(self) -> None:
        """Wait until all events are on the disk."""
        for path in [self.path / name for name in EVENTS]:
            if path.is_file():
                sync(path)

    def write_json(self, name: str, document: dict[str, Any]) -> None:
        """Write a JSON document whole or not at all."""
        write_whole(self.path / name, json.dumps(document, indent=2) + "\n")

    def append(self, name: str, event: dict[str, Any]) -> None:
        """Add one event to a .jsonl file; a disk that is full costs the event, not the run."""
        try:
            append_line(self.path / name, json.dumps(event, ensure_ascii=False))
        except OSError as error:
            logger.warning("%s: an event of step %s is lost (%s)", self.path / name, event.get("step"), error.strerror)


def _accounts_before(status: dict[str, Any]) -> dict[str, float]:
    """Return the accounts of earlier attempts from the run's status.

    Seconds without an account are counted as redone. The wait since the last status is idle time if the supervisor was
    already running then.
    """
    recorded = status.get("accounts") or {}
    accounts = {name: recorded.get(name, 0.0) for name in ACCOUNTS}
    accounts["redone"] += max(0.0, round(status.get("seconds", 0.0) - sum(accounts.values()), 2))
    since, updated = noted(SINCE), status.get("updated")
    last = datetime.datetime.fromisoformat(updated).timestamp() if updated else -math.inf
    if since is not None and last >= float(since):
        accounts["idle"] += max(0.0, time.time() - process_seconds() - last)
    return accounts


def _stays(event: dict[str, Any] | None, step: int, validates_again: bool) -> bool:
    """Return whether rewinding to `step` keeps an event. A torn line (None) is dropped."""
    if event is None or not isinstance(event.get("step"), int):
        return False
    again = validates_again and ("eval_loss" in event or "text" in event)
    return event["step"] < step or (event["step"] == step and not again)


def refuse_another_run(
    saved: dict[str, Any], asked: dict[str, Any], *, where: Path, allow_change: bool = False
) -> None:
    """Raise UserError, with the differences, where what is saved was not asked for; only warn of what is allowed.

    How far a run was extended is no difference: that is between --extend_to and the checkpoint.
    """
    asked = json.loads(json.dumps(asked))
    keys = [key for key in dict.fromkeys([*saved, *asked]) if key != "extensions" and saved.get(key) != asked.get(key)]
    if not keys:
        return
    changed = "; ".join(f"{key} {_shown(saved.get(key))} -> {_shown(asked.get(key))}" for key in keys)
    mend = "undo the change or name another --output_dir"
    if set(keys) <= CHANGEABLE:
        if allow_change:
            logger.warning("%s goes on as another run: %s", where, changed)
            return
        mend += ", or go on with the change by --allow_resume_change"
    raise UserError(f"{where} belongs to another run ({changed}): {mend}")


def _shown(value: Any) -> str:
    return "nothing" if value == "" else str(value)


def now() -> str:
    """The time in ISO form, UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def describe_environment() -> dict[str, Any]:
    """Versions, the commit and the command: what it takes to say where a number comes from."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    root = Path(__file__).parents[2]
    git = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() or None
    except OSError:
        commit = None
    return {"versions": versions, "commit": commit, "command": " ".join(sys.argv), "started": now()}

"""Choose the checkpoint to resume from, and check that the run can be resumed."""

import dataclasses
import json
import logging
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from gpt2_repro import ranks
from gpt2_repro.checkpoints.conversion import DEEPSPEED_CLASSES, convert
from gpt2_repro.checkpoints.manifest import SILLY_RENAME, defect, read_manifest, training_record
from gpt2_repro.checkpoints.rotation import (
    choose_checkpoint,
    newest_checkpoint,
    set_aside,
    sweep,
)
from gpt2_repro.errors import UserError
from gpt2_repro.launchers import current_launcher, launcher_of_checkpoint
from gpt2_repro.manifest import SPLITS
from gpt2_repro.run_record import RunRecord, events, layout


logger = logging.getLogger(__name__)

# transformers reads these files with `weights_only` and the few further classes that a random state needs.
CHECKED_BY_TRANSFORMERS = ("rng_state", "scheduler.pt", "optimizer.pt")


@dataclasses.dataclass(frozen=True)
class RunIdentity:
    """The settings that make a run the same run, as far as they are known before it starts.

    Args:
        values: the settings by name. JSON values.
        changeable: names of the settings that --allow_resume_change may change.
        allow_change: whether --allow_resume_change is set.
    """

    values: Mapping[str, Any]
    changeable: Collection[str] = ()
    allow_change: bool = False

    def require_same(self, saved: Mapping[str, Any], *, where: Path | str, option: str = "--output_dir") -> None:
        """Raise UserError if a run with the settings `saved` is another run.

        Args:
            saved: the values in a checkpoint or in environment.json.
            where: the path of the checkpoint, the run directory or its copy, for the message.
            option: the option that selects another path.
        """
        current = json.loads(json.dumps(dict(self.values)))
        if current.keys() - saved.keys():
            raise UserError(f"{where} belongs to a run of another version of this project. Pass another {option}.")
        differing: list[str] = []
        for name in dict.fromkeys([*saved, *current]):
            if saved.get(name) != current.get(name):
                differing.append(name)
        if not differing:
            return
        changed = "; ".join(f"{name} {saved.get(name)!r} -> {current.get(name)!r}" for name in differing)
        changed = re.sub(r"\b([0-9a-f]{8})[0-9a-f]{56}\b", r"\1…", changed)  # hashes
        fix = f"Undo the change or pass another {option}"
        if set(differing) <= set(self.changeable):
            if self.allow_change:
                logger.warning("%s continues with changed settings: %s", where, changed)
                return
            fix += ", or pass --allow_resume_change to continue with the change"
        raise UserError(f"{where} belongs to a run with other settings ({changed}). {fix}.")


@dataclasses.dataclass(frozen=True)
class Start:
    """The checkpoint from which a run resumes, or the start at step 0.

    Args:
        is_finished: whether the run is complete, so that nothing is left to do.
        checkpoint: the folder of the checkpoint. None: start at step 0.
        manifest: the manifest of the checkpoint, or {} without a checkpoint.
        is_validated: whether metrics.jsonl has the validation at the step of the checkpoint.
        remarks: one message for each checkpoint that was skipped, with the reason.
    """

    is_finished: bool = False
    checkpoint: Path | None = None
    manifest: dict[str, Any] = dataclasses.field(default_factory=dict)
    is_validated: bool = False
    remarks: tuple[str, ...] = ()

    @property
    def step(self) -> int:
        """The step of the checkpoint, or 0 without a checkpoint."""
        return 0 if self.checkpoint is None else layout.step_of(self.checkpoint)

    def needs_conversion(self, processes: int) -> bool:
        """Return whether another number of DeepSpeed processes has written the checkpoint."""
        return self.manifest.get("deepspeed_processes") not in (None, processes)


def choose_start(
    run: RunRecord,
    identity: RunIdentity,
    *,
    max_steps: int,
    resume_from: str = "",
    verified: Path | None = None,
) -> Start:
    """Choose the checkpoint to start from.

    Call this on rank 0 only. The run directory is locked, if it exists.

    Args:
        max_steps: the last step of the run.
        resume_from: the name of a checkpoint. "": the newest complete one.
        verified: the checkpoint of the run whose files have just been verified, if there is one.

    Raises UserError if the run directory is in use, belongs to another run, has only damaged checkpoints or a final/
    without a checkpoint, or if loading the checkpoint could run code.
    """
    check_owner(run)
    saved = run.environment().run_identity
    if saved:
        identity.require_same(saved, where=run.path)
    if not resume_from and is_finished(run, max_steps):
        return Start(is_finished=True)
    if run.path.is_dir():
        run.lock()  # a new run directory is locked later, when the model is built
    checkpoint, skipped = choose_checkpoint(run.path, resume_from, verified=verified)
    if checkpoint is None:
        _require_no_result(run, skipped)
        return Start()
    manifest = read_manifest(checkpoint)
    check_resumable(checkpoint, manifest, identity, max_steps=max_steps)
    refuse_code(checkpoint, manifest["files"])
    losses = events.validation_losses(run.metrics, layout.step_of(checkpoint))
    return Start(
        checkpoint=checkpoint,
        manifest=manifest,
        is_validated=bool(losses),
        remarks=tuple(skipped),
    )


def check_resumable(
    checkpoint: Path | str, manifest: Mapping[str, Any], identity: RunIdentity, *, max_steps: int
) -> None:
    """Raise UserError if this run or its launcher cannot resume from a checkpoint with this manifest.

    `checkpoint` is its folder, here or at a place of copies.
    """
    saved = manifest.get("run_identity", {})
    step = layout.step_of(Path(checkpoint))
    by = launcher_of_checkpoint(manifest["files"])
    if by.form != current_launcher().form:
        fix = f"Launch with --config_file {by.config} or pass another --output_dir."
        raise UserError(f"{checkpoint} has the format of the launcher {by.name}, which this one cannot load. {fix}")
    before = _precision(saved)
    if by.deepspeed_json and before != _precision(identity.values):
        fix = f"Pass --precision {before} or a new --output_dir."
        raise UserError(f"DeepSpeed cannot change the precision of {checkpoint}. {fix}")
    identity.require_same(saved, where=checkpoint)
    if step > max_steps:
        raise UserError(f"{checkpoint} is beyond the last step ({max_steps}). Pass a larger --max_steps.")


def _precision(identity: Mapping[str, Any]) -> str:
    """Return the precision in a run identity, or `fp32` without one."""
    if identity.get("bf16"):
        return "bf16"
    return identity.get("precision") or "fp32"


def is_finished(run: RunRecord, steps: int) -> bool:
    """Return whether a run is complete and was planned for `steps` optimizer steps."""
    # A run that is killed directly after it has written final/ cannot record its state. But if there are
    # checkpoints, final/ may be older than they are.
    newest = newest_checkpoint(run.path)
    if defect(run.final) is not None:
        return False
    if run.status().state != "complete" and newest is not None:
        return False
    record = training_record(run.final)
    if record is None:
        return False
    identity = record.environment.run_identity
    if newest is not None:
        # A run that went back and was restored elsewhere can have its newest checkpoint, but an older final/.
        if read_manifest(newest).get("run_identity") != identity:
            return False
        if layout.step_of(newest) > (record.step or 0):
            return False
    return steps == identity.get("max_steps")


def check_owner(run: RunRecord) -> None:
    """Raise UserError unless the path of a run is new, empty or a run directory."""
    path = run.path
    if path.exists() and not path.is_dir():
        raise UserError(f"--output_dir {path} is a file.")
    for parent in path.resolve().parents:
        if (parent / layout.STATUS).is_file() or (parent / SPLITS).is_file():
            raise UserError(f"--output_dir {path} is inside another run or prepared folder, {parent}.")
    if not path.is_dir():
        return
    visible = [entry for entry in path.iterdir() if not entry.name.startswith(".")]
    if not visible:
        return
    # One intact file is enough, because a power cut may have emptied all other files of the run.
    has_file = bool(run.status().state or run.environment().run_identity or run.recipe().get("training"))
    if not has_file and newest_checkpoint(path) is None:
        raise UserError(f"--output_dir {path} is neither empty nor a run directory.")


def prepare_run_directory(run: RunRecord, start: Start, *, max_steps: int, validates_again: bool) -> None:
    """Remove what an earlier attempt left after the step at which this one starts. Call this on rank 0 only."""
    for remark in start.remarks:
        logger.warning(remark)
    # Newer checkpoints are damaged, or the run goes back before them. Rotation would keep them as the newest and
    # delete complete ones.
    for path in set_aside(run.path, after=start.step):
        logger.info("Renamed a checkpoint to %s, because the run resumes from an earlier step.", path)
    sweep(run.path)
    if start.checkpoint is not None:
        logger.info("resuming from %s", start.checkpoint)
    reached = -1 if start.checkpoint is None else start.step
    run.add_redone_steps(start.step, start.manifest.get("time_breakdown", {}))
    run.rewind(reached, validates_again=validates_again)
    losses: dict[str, float | None] = dict.fromkeys(run.status().losses)  # None for those that are out of date
    losses.update(events.validation_losses(run.metrics))
    run.write_status("running", max_steps=max_steps, step=start.step, reason=None, **losses)


def _require_no_result(run: RunRecord, skipped: list[str]) -> None:
    """Raise UserError if a run without a complete checkpoint cannot start at step 0."""
    if skipped:
        fix = "Move these checkpoints out of the run directory, or pass another --output_dir."
        raise UserError(f"All checkpoints are incomplete or damaged ({'; '.join(skipped)}). {fix}")
    if run.final.exists():
        problem = defect(run.final)
        reason = "has no checkpoint to continue from"
        if problem is not None:
            reason = f"is damaged ({problem})"
        raise UserError(f"{run.final} {reason}. Pass another --output_dir.")
    reached = run.reached()
    if reached:
        logger.warning("%s had reached step %d without a checkpoint. Training starts again.", run.path, reached)


def refuse_code(checkpoint: Path, files: Collection[str]) -> None:
    """Raise UserError if loading a checkpoint could run code.

    The error is also raised if the checkpoint contains a symbolic link, or a file that is not in `files`.

    Args:
        files: the paths of the files that the manifest of the checkpoint lists.
    """
    tag = f"global_step{layout.step_of(checkpoint)}"
    known = {*files, layout.CHECKPOINT_MANIFEST}
    for path in sorted(checkpoint.rglob("*")):
        if path.name.startswith(SILLY_RENAME):
            continue
        name = str(path.relative_to(checkpoint))
        is_foreign = path.is_symlink() or (path.is_file() and name not in known)
        # DeepSpeed loads the folder that the file `latest` names.
        is_pointer = not is_foreign and name.startswith("latest")
        if is_foreign or (is_pointer and path.read_text(encoding="utf-8").strip() != tag):
            raise UserError(f"Unexpected file in the checkpoint, refusing to resume: {path}. Move the file away.")
        if path.suffix not in (".pt", ".pth", ".bin") or name.startswith(CHECKED_BY_TRANSFORMERS):
            continue
        named = _unsafe_names(path)
        if named:
            raise UserError(f"Loading {path} could run code ({named}). Resume from another checkpoint.")


def _unsafe_names(path: Path) -> str:
    """Return the code that a pickle file refers to, and that DeepSpeed would run, or "" for a safe file.

    The file is parsed, but not loaded.
    """
    from torch.serialization import get_unsafe_globals_in_checkpoint

    try:
        names = set(get_unsafe_globals_in_checkpoint(path))
    except Exception as error:  # a file that torch.save did not write can cause any exception
        return f"{type(error).__name__}: {error}"
    return ", ".join(sorted(names - DEEPSPEED_CLASSES))


def folder_to_load(start: Start, *, staging: Path, processes: int) -> str | None:
    """Return the checkpoint folder for Trainer to load, or None to start at step 0.

    This is a collective: call it on all ranks.

    Args:
        staging: the folder for a converted copy of the checkpoint. The copy is needed if the number of DeepSpeed
            processes has changed. The next save deletes the copy.
        processes: the number of processes of this start.
    """
    if start.checkpoint is None:
        return None
    checkpoint = start.checkpoint
    if not start.needs_conversion(processes):
        return str(checkpoint)
    copy = staging / checkpoint.name

    def convert_once() -> None:
        convert(checkpoint, copy, step=start.step)
        written_by = start.manifest["deepspeed_processes"]
        logger.info("converted %s from %d to %d processes", checkpoint, written_by, processes)

    ranks.decide(convert_once)  # the other ranks wait, and get its error
    return str(copy)

"""Choose the checkpoint to resume from, and check that the run can be resumed."""

import copy
import dataclasses
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from accelerate.utils import broadcast_object_list

from gpt2_repro.batch_plan import BatchPlan, extend_plan
from gpt2_repro.errors import UserError
from gpt2_repro.launchers import current_launcher, launcher_of_checkpoint
from gpt2_repro.manifest import Manifest
from gpt2_repro.model.arguments import Overrides, recorded_overrides
from gpt2_repro.run_record import RunRecord, checkpoints, events, layout
from gpt2_repro.training.arguments import PretrainingArguments
from gpt2_repro.training.when import validates_at_start


logger = logging.getLogger(__name__)

# The classes that deepspeed 0.19.8 pickles into a checkpoint, apart from tensors and plain containers.
DEEPSPEED_CLASSES = {
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
}
# transformers reads these files with `weights_only` and the few further classes that a random state needs.
CHECKED_BY_TRANSFORMERS = ("rng_state", "scheduler.pt", "optimizer.pt")

SCHEDULE = ("learning_rate", "warmup_steps", "final_learning_rate_fraction", "lr_scheduler_type", "decay_fraction")
OPTIMIZER = ("optim", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon")
# Options that earlier checkpoints do not have, with their defaults. A default is not recorded.
NEWER = {"ema_steps": 0, "muon_momentum": 0.95}
ORDER = ("seed", "data_seed", "train_sampling_strategy", "skip_loss_z", "skip_grad_z")
# Fields that --allow_resume_change may override (bf16: not under DeepSpeed). The other fields determine the shapes or
# the optimizer state of the checkpoint. tokens_per_step determines the position in the data, which is counted in
# steps.
CHANGEABLE = {*SCHEDULE, *ORDER, "max_grad_norm", "data", "max_steps", "bf16", "dropout"}


@dataclasses.dataclass(frozen=True)
class Start:
    """The checkpoint from which a run resumes, or the start at step 0.

    Args:
        checkpoint: the folder of the checkpoint. None: start at step 0.
        manifest: the manifest of the checkpoint, or {} without a checkpoint.
        is_validated: whether metrics.jsonl has the validation at the step of the checkpoint.
        remarks: one message for each checkpoint that was skipped, with the reason.
    """

    checkpoint: Path | None = None
    manifest: dict[str, Any] = dataclasses.field(default_factory=dict)
    is_validated: bool = False
    remarks: tuple[str, ...] = ()

    @property
    def step(self) -> int:
        """The step of the checkpoint, or 0 without a checkpoint."""
        return 0 if self.checkpoint is None else layout.step_of(self.checkpoint)


def find_start(run: Path, *, name: str = "", main_process: bool = True) -> Start:
    """Find the checkpoint to resume from.

    This is a collective: call it on all ranks. A run without checkpoints starts at step 0.

    Args:
        name: the name or path of the checkpoint. If it is empty, the newest complete checkpoint is used.
        main_process: whether this process is rank 0.

    Raises UserError on all ranks if the named checkpoint is missing or damaged, if all checkpoints are damaged, or if
    loading the checkpoint could run code.
    """
    # Only rank 0 reads the run directory, because other ranks may see a different state of the file system.
    found: list[Start | UserError | None] = [None]
    if main_process:
        try:
            found = [_look(run, name)]
        except UserError as error:
            found = [error]
    (start,) = broadcast_object_list(found)
    if isinstance(start, UserError):
        raise start
    return start


def _look(run: Path, name: str) -> Start:
    chosen, skipped = (checkpoints.named(run, name), []) if name else checkpoints.newest_complete(run)
    if chosen is None and skipped:
        raise UserError(
            f"All checkpoints are incomplete or damaged ({'; '.join(skipped)}). Move these checkpoints out of the run "
            "directory, or pass another --output_dir."
        )
    if chosen is None:
        return Start()
    manifest = checkpoints.read_manifest(chosen)
    if "run_identity" not in manifest:
        raise UserError(f"{chosen} was written by an earlier version of train.py. Pass another --output_dir.")
    refuse_code(chosen, manifest["files"])
    is_validated = bool(events.validation_losses(run / layout.METRICS, layout.step_of(chosen)))
    return Start(chosen, manifest, is_validated, tuple(skipped))


def refuse_code(checkpoint: Path, files: Collection[str]) -> None:
    """Raise UserError if loading a checkpoint could run code.

    The error is also raised if the checkpoint contains a symbolic link, or a file that is not in `files`.

    Args:
        files: the paths of the files that the manifest of the checkpoint lists.
    """
    tag = f"global_step{layout.step_of(checkpoint)}"
    for path in sorted(checkpoint.rglob("*")):
        if path.name.startswith(checkpoints.SILLY_RENAME):
            continue
        name = str(path.relative_to(checkpoint))
        # DeepSpeed loads the folder that the file `latest` names.
        foreign = path.is_file() and name not in files and name != layout.MANIFEST
        if (
            path.is_symlink()
            or foreign
            or (name.startswith("latest") and path.read_text(encoding="utf-8").strip() != tag)
        ):
            raise UserError(f"Unexpected file in the checkpoint, refusing to resume: {path}. Move the file away.")
        if path.suffix not in (".pt", ".pth", ".bin") or name.startswith(CHECKED_BY_TRANSFORMERS):
            continue
        # A pickle file can refer to code, which DeepSpeed would run. This check parses the file without loading it.
        try:
            named = set(torch.serialization.get_unsafe_globals_in_checkpoint(path)) - DEEPSPEED_CLASSES
        except Exception as error:  # a file that torch.save did not write can cause any exception
            named = {f"{type(error).__name__}: {error}"}
        if named:
            raise UserError(
                f"Loading {path} could run code ({', '.join(sorted(named))}). Resume from another checkpoint."
            )


def choose_start(
    run: RunRecord, args: PretrainingArguments, plan: BatchPlan, run_identity: dict[str, Any]
) -> tuple[Start, PretrainingArguments, BatchPlan, list[list[int]]]:
    """Choose the checkpoint to start from, and extend the run if --extend_to is set.

    This is a collective: call it on all ranks. Rank 0 locks the run directory, if the directory exists.

    Returns four values: the start, a copy of `args`, the batch plan, and the list of all extensions of the run. The
    copy and the batch plan include the steps of the extensions. Each extension is a list of two steps: the step at
    which the extension starts, and the new last step of the run.

    Raises UserError if the checkpoint does not fit the settings or the launcher, or if there is a final/ but no
    checkpoint.
    """
    main_process = args.process_index == 0
    if main_process and run.path.is_dir():
        run.lock()  # a new run directory is locked later, by RunRecord.claim
    start = find_start(run.path, name=args.resume_from, main_process=main_process)
    extensions = start.manifest.get("run_identity", {}).get("extensions", [])
    plan, extensions = extend_plan(plan, args.extend_to, extensions=extensions, step=start.step)
    args = copy.copy(args)
    args.max_steps = plan.max_steps
    args.eval_on_start = validates_at_start(args, start.step, is_validated=start.is_validated)
    if start.checkpoint is None:
        if run.final.exists():
            if defect := run.final_defect():
                fix = "Replace this folder with an undamaged copy, or pass another --output_dir."
                raise UserError(f"{run.final} is damaged ({defect}). {fix}")
            raise UserError(
                f"{run.path} is complete, and has no checkpoint to continue from. Pass another --output_dir."
            )
        if main_process and (reached := run.status().step):
            logger.warning(
                "%s had reached step %d, but it has no checkpoint. Training starts again at step 0.", run.path, reached
            )
        return start, args, plan, extensions
    saved, where = start.manifest["run_identity"], start.checkpoint
    by = launcher_of_checkpoint(start.manifest["files"])
    if by.deepspeed_json and saved.get("bf16") != run_identity.get("bf16"):
        fix = f"Pass --bf16 {str(bool(saved.get('bf16'))).lower()} or a new --output_dir."
        raise UserError(f"DeepSpeed cannot change the precision of {where}. {fix}")
    require_same_run(saved, run_identity, where=where, allow_change=args.allow_resume_change)
    if start.step > plan.max_steps:
        raise UserError(
            f"{where} is beyond the last step of the run (--max_steps {plan.max_steps}). Pass a larger --max_steps, or "
            "an earlier checkpoint as --resume_from."
        )
    require_same_form(where, start.manifest["files"])
    return start, args, plan, extensions


def require_same_form(checkpoint: Path, files: Collection[str]) -> None:
    """Raise UserError if the current launcher uses another checkpoint format.

    For example, a run with DeepSpeed cannot load a checkpoint of FSDP2.

    Args:
        files: the paths of the files that the manifest of the checkpoint lists.
    """
    by = launcher_of_checkpoint(files)
    if by.form != current_launcher().form:
        fix = f"Launch with --config_file {by.config} or pass another --output_dir."
        raise UserError(f"{checkpoint} was written {by.form.words}, so a run with this launcher cannot load it. {fix}")


def loadable(start: Start, *, staging: Path, accelerator: Any) -> str | None:
    """Return the checkpoint folder for Trainer to load, or None to start at step 0.

    This is a collective: call it on all ranks.

    Args:
        staging: the folder for a converted copy of the checkpoint. The copy is needed if the number of DeepSpeed
            processes has changed. The next save deletes the copy.
    """
    if start.checkpoint is None:
        return None
    written_by, processes = start.manifest["deepspeed_processes"], accelerator.num_processes
    if written_by in (None, processes):
        return str(start.checkpoint)
    copy = staging / start.checkpoint.name
    if accelerator.is_main_process:
        began = time.perf_counter()
        convert(start.checkpoint, copy, step=start.step)
        seconds = time.perf_counter() - began
        logger.info("converted %s from %d to %d processes in %.1f s", start.checkpoint, written_by, processes, seconds)
    accelerator.wait_for_everyone()
    config = accelerator.state.deepspeed_plugin.deepspeed_config
    config["checkpoint"] = config.get("checkpoint", {}) | {"load_universal": True}
    return str(copy)


def convert(checkpoint: Path, copy: Path, *, step: int) -> None:
    """Convert a DeepSpeed checkpoint to universal form, with one file per weight.

    Args:
        copy: the folder to create.

    Raises UserError if the disk has too little space for the copy.
    """
    needed, free = 1.2 * checkpoints.size(checkpoint), shutil.disk_usage(checkpoint).free
    if free < needed:
        raise UserError(
            f"Converting {checkpoint} to another number of processes needs {(needed - free) / 1e6:,.0f} MB more free "
            "disk space. Free this space, or start as many processes as the run had when it saved the checkpoint."
        )
    copy.mkdir(parents=True)
    for path in checkpoint.iterdir():
        if not path.name.startswith("latest"):
            (copy / path.name).symlink_to(path.resolve())
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    command += ["--input_folder", str(checkpoint / f"global_step{step}")]
    command += ["--output_folder", str(copy / f"global_step{step}_universal")]
    alone = {name: value for name, value in os.environ.items() if not name.startswith(("LOCAL_", "TORCHELASTIC_"))}
    alone |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(command, env=alone, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def run_identity_of(
    args: PretrainingArguments | SimpleNamespace, plan: BatchPlan, *, data: Manifest, model: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the identity of a run: the settings that must not change on a resume.

    Args:
        model: the section `model:` of the recipe.
    """
    return {
        "data": data.sha256["train"],
        "tokenizer": data.tokenizer_sha256,
        "sequence_length": plan.sequence_length,
        "tokens_per_step": plan.tokens_per_step,
        "max_steps": plan.max_steps,
        "bf16": args.bf16,
        **{key: value for key, value in model.items() if key != "attn_implementation"},
        **{name: getattr(args, name) for name in (*SCHEDULE, *OPTIMIZER, "max_grad_norm", *ORDER)},
        **{name: getattr(args, name) for name, default in NEWER.items() if getattr(args, name) != default},
    }


def require_same_run(
    saved: Mapping[str, Any], asked: Mapping[str, Any], *, where: Path, allow_change: bool = False
) -> None:
    """Raise UserError if two runs differ in settings that must not change on a resume.

    Args:
        saved: the result of `run_identity_of` in the checkpoint or in environment.json.
        asked: the result of `run_identity_of` for the requested run.
        where: the path of the checkpoint or the run directory, for the message.
        allow_change: if all settings that differ are in CHANGEABLE, log a warning instead of raising UserError.
    """
    saved, asked = NEWER | dict(saved), NEWER | json.loads(json.dumps(asked))
    if "config_overrides" in saved:
        saved["config_overrides"] = Overrides(json.dumps(recorded_overrides(saved)))
    # Extensions are determined by --extend_to and the checkpoint.
    keys = [key for key in dict.fromkeys([*saved, *asked]) if key != "extensions" and saved.get(key) != asked.get(key)]
    if not keys:
        return
    changed = "; ".join(f"{key} {saved.get(key)!r} -> {asked.get(key)!r}" for key in keys)
    changed = re.sub(r"\b([0-9a-f]{8})[0-9a-f]{56}\b", r"\1…", changed)  # hashes
    fix = "Undo the change or pass another --output_dir"
    if set(keys) <= CHANGEABLE:
        if allow_change:
            logger.warning("%s continues with changed settings: %s", where, changed)
            return
        fix += ", or pass --allow_resume_change to continue with the change"
    raise UserError(f"{where} belongs to a run with other settings ({changed}). {fix}.")

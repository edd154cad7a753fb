"""The identity of a run: the settings that a resumed run must share with the one that was saved."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpt2_repro.batch_plan import BatchPlan
from gpt2_repro.errors import UserError
from gpt2_repro.manifest import Manifest
from gpt2_repro.training.arguments import PretrainingArguments


logger = logging.getLogger(__name__)

SCHEDULE = ("learning_rate", "warmup_steps", "final_learning_rate_fraction", "lr_scheduler_type", "decay_fraction")
OPTIMIZER = ("optim", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon")
ORDER = ("seed", "data_seed", "train_sampling_strategy", "skip_loss_z", "skip_grad_z")
# Fields that --allow_resume_change may override. The others decide states or shapes of the checkpoint; of
# tokens_per_step it is the position in the order of rows, which is counted in steps.
CHANGEABLE = {*SCHEDULE, *ORDER, "max_grad_norm", "data", "max_steps", "bf16", "dropout"}


def run_identity_of(
    args: PretrainingArguments, plan: BatchPlan, *, data: Manifest, model: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the identity of a run.

    Args:
        data: the manifest of the prepared folder.
        model: the recipe's section.
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
    }


def require_same_run(
    saved: Mapping[str, Any], asked: Mapping[str, Any], *, where: Path, allow_change: bool = False
) -> None:
    """Raise UserError, with the differences, if `saved` is another run than `asked`; only warn of allowed changes.

    How far a run was extended is not compared: that is decided by --extend_to and the checkpoint.
    """
    asked = json.loads(json.dumps(asked))
    keys = [key for key in dict.fromkeys([*saved, *asked]) if key != "extensions" and saved.get(key) != asked.get(key)]
    if not keys:
        return
    changed = "; ".join(f"{key} {_shown(saved.get(key))} -> {_shown(asked.get(key))}" for key in keys)
    fix = "undo the change or pass another --output_dir"
    if set(keys) <= CHANGEABLE:
        if allow_change:
            logger.warning("%s continues with changes: %s", where, changed)
            return
        fix += ", or pass --allow_resume_change to continue with it"
    raise UserError(f"{where} belongs to another run ({changed}): {fix}")


def _shown(value: Any) -> str:
    return "nothing" if value == "" else str(value)

"""Checks of the launcher's files before anything is built: the stack silently ignores most mistakes in them.

Read in accelerate 1.15 and deepspeed 0.19.8: an unknown key at the top of a DeepSpeed JSON does nothing, a JSON without
`gradient_clipping` clips at 1.0 whatever the recipe says, and `accelerate launch --cpu` drops DeepSpeed.
"""

import ctypes
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from gpt2_repro.errors import UserError, did_you_mean
from gpt2_repro.launchers import LAUNCHERS, current_launcher


PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # <linux/prctl.h>
LAUNCHER_DIED = signal.SIGUSR2
AUTO = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
OWNED_BY_THE_RECIPE = {
    "gradient_clipping": "leave it out, and pass --max_grad_norm after train.py",
    "gradient_accumulation_steps": "leave it out, it is derived from tokens_per_step",
}
REFUSED = {
    "optimizer": "the recipe chooses the optimizer",
    "scheduler": "the recipe chooses the schedule",
    "fp16": "it needs loss scaling that no recipe has; bf16 or fp32",
    "amp": "bf16 is the recipe's",
    "checkpoint": "train.py writes checkpoints, and converts them where it has to",
}
# Keys that DeepSpeed reads, and those of the blocks that it does not check itself.
KEYS = (
    *(*AUTO, "bf16", "data_types", "timers", "zero_optimization", "communication_data_type", "prescale_gradients"),
    *("gradient_predivide_factor", "steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state"),
    *("comms_logger", "flops_profiler", "disable_python_gc", "log_level"),
)
MASTERS = "bf16_master_weights_and_grads"
BLOCKS = {
    "bf16": ("enabled", "immediate_grad_update", "check_grad_overflow", MASTERS, "bf16_optimizer_states"),
    "data_types": ("grad_accum_dtype",),
    "timers": ("throughput",),
}


def end_with_launcher() -> None:
    """Make the kernel send LAUNCHER_DIED when the launcher dies: workers of a killed launcher would train on.

    Linux only. Elsewhere they train until they are ended by hand.
    """
    # Torch's launcher sets the first, accelerate's for one process the second.
    launched = {"TORCHELASTIC_RUN_ID", "ACCELERATE_USE_CPU"} & os.environ.keys()
    if not launched or sys.platform != "linux":
        return
    launcher = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, LAUNCHER_DIED)
    if os.getppid() != launcher:  # it died before
        os.kill(os.getpid(), LAUNCHER_DIED)


def adopt_orphans() -> None:
    """Make orphaned descendants children of this process, so that it can wait for them. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def check_launcher() -> None:
    """Raise UserError if the launcher would not do what its files and flags say."""
    if os.environ.get("ACCELERATE_USE_CPU", "").lower() == "true":
        raise UserError("`accelerate launch --cpu` drops DeepSpeed. Leave it out and pass --use_cpu after train.py.")
    for name, mend in OWNED_BY_THE_RECIPE.items():
        value = os.environ.get(f"ACCELERATE_{name.upper()}", "auto")
        if value != "auto":
            raise UserError(f"the launcher's file has {name} {value}, which belongs to the recipe: {mend}")
    path = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true" and path != "none":
        check_deepspeed_json(Path(path))
    if current_launcher() == LAUNCHERS["fsdp2"]:
        check_fsdp()


def check_deepspeed_json(path: Path) -> None:
    """Raise UserError for a DeepSpeed JSON that is missing, has unknown keys, or sets what the recipe owns."""
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"there is no {path}: run from the repository's root, with a JSON of ds_configs/") from None
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}") from None
    for key, value in config.items():
        if key in REFUSED:
            raise UserError(f"{path}: {key} cannot be set: {REFUSED[key]}")
        if key not in KEYS:
            raise UserError(f"{path} has no key {key!r} that does anything: {did_you_mean(key, KEYS)}")
        for inner in value if key in BLOCKS and isinstance(value, dict) else ():
            if inner not in BLOCKS[key]:
                raise UserError(f"{path}: {key} has no key {inner!r}: {did_you_mean(inner, BLOCKS[key])}")
    bf16: dict[str, Any] = config.get("bf16", {})
    owned = {key: config.get(key) for key in AUTO} | {"bf16.enabled": bf16.get("enabled", "auto")}
    for key, value in owned.items():
        if value != "auto":
            raise UserError(f'{path}: {key} belongs to the recipe: set it to "auto"')
    if bf16.get(MASTERS):
        raise UserError(f"{path}: {MASTERS} trains without fp32 masters. Leave it out.")


# Required values of the block fsdp_config, by names without `fsdp_`, each with its reason. "none": not set.
FSDP = {
    "version": ("2", "the first version of FSDP flattens weights"),
    "state_dict_type": ("FULL_STATE_DICT", "the other forms are loaded by pickle, or by as many processes only"),
    "cpu_ram_efficient_loading": ("false", "every process draws its weights from the seed"),
    "reshard_after_forward": ("true", "checkpoints and samples read the fp32 masters between two steps"),
    "offload_params": ("false", "weights stay on the devices"),
    "activation_checkpointing": ("false", "the recipe sets it: pass --activation_checkpointing after train.py"),
    "auto_wrap_policy": ("none", "each block is a unit"),
}


def check_fsdp() -> None:
    """Raise UserError for one process, and for settings of FSDP that would do nothing or harm."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        raise UserError("FSDP needs several processes. Pass --num_processes, or launch with single_gpu.yaml.")
    for name, (needed, why) in FSDP.items():
        value = os.environ.get(f"FSDP_{name.upper()}", "none")
        if value != needed:
            mend = "leave it out" if needed == "none" else f"write fsdp_{name}: {needed}"
            raise UserError(f"the launcher's file has fsdp_{name} {value}: {mend}, for {why}")

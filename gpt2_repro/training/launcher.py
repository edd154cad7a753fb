"""Check the config files of the launcher, and detect when the launcher dies.

accelerate 1.15 and deepspeed 0.19.8 silently ignore most mistakes in config files.
"""

import ctypes
import json
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpt2_repro.errors import UserError, did_you_mean
from gpt2_repro.hardware import cpu_cores
from gpt2_repro.launchers import LAUNCHERS, current_launcher


PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # <linux/prctl.h>
LAUNCHER_DIED = signal.SIGUSR2
AUTO = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
OWNED_BY_THE_RECIPE = {
    "gradient_clipping": "Remove gradient_clipping and pass --max_grad_norm after train.py.",
    "gradient_accumulation_steps": "Remove this setting. The value is derived from tokens_per_step.",
}
REFUSED = {
    "optimizer": "the recipe sets the optimizer",
    "scheduler": "the recipe sets the learning-rate schedule",
    "fp16": "fp16 needs loss scaling, and recipes support bf16 and fp32 only",
    "amp": "the recipe sets the precision (bf16)",
    "checkpoint": "train.py writes checkpoints and converts them if necessary",
    "compute_grad_norm": "train.py skips updates whose gradient norm is not finite",
}
# The top-level keys that DeepSpeed reads. BLOCKS: the keys inside of blocks that DeepSpeed does not check.
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


def choose_gloo_interface() -> None:
    """Let gloo use the network interface of NCCL_SOCKET_IFNAME.

    By default, gloo uses the interface of the host name, which often does not lead to other machines in containers.
    """
    wanted = os.environ.get("NCCL_SOCKET_IFNAME", "")
    names = [name for _, name in socket.if_nameindex() if name.startswith(wanted.removeprefix("="))]
    if wanted and names:  # not for the forms ^NAME and NAME,NAME
        os.environ.setdefault("GLOO_SOCKET_IFNAME", min(names, key=len))


def end_with_launcher() -> None:
    """On Linux, make this process receive a signal when the launcher dies.

    The signal is LAUNCHER_DIED (SIGUSR2).
    """
    # torch's launcher sets the first variable. accelerate's launcher of a single process sets the second.
    launched = {"TORCHELASTIC_RUN_ID", "ACCELERATE_USE_CPU"} & os.environ.keys()
    if not launched or sys.platform != "linux":
        return  # without Linux, the processes of a killed launcher train until they are ended by hand
    launcher = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, LAUNCHER_DIED)
    if os.getppid() != launcher:  # the launcher died before prctl was called
        os.kill(os.getpid(), LAUNCHER_DIED)


def check_cores(argv: Sequence[str]) -> None:
    """Raise UserError if a run on the CPU has more than two processes per core."""
    processes, cores = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), cpu_cores()
    # Without torch, which these processes would import at the same time.
    finding = "" if "--use_cpu" in argv else "No GPU found. "
    if processes > 2 * cores and not (finding and any(Path("/dev").glob("nvidia[0-9]*"))):
        fix = f"Pass --num_processes {cores} to accelerate launch, before train.py."
        raise UserError(f"{finding}{processes} processes are too many for {cores} CPU cores. {fix}")


def adopt_orphans() -> None:
    """On Linux, make this process the parent of descendants that lose their parent."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def check_launcher() -> None:
    """Raise UserError for unsupported settings of `accelerate launch`. Set the network interface of gloo."""
    choose_gloo_interface()
    if os.environ.get("ACCELERATE_USE_CPU", "").lower() == "true":
        raise UserError("`accelerate launch --cpu` is not supported. Pass --use_cpu after train.py instead.")
    if (precision := os.environ.get("ACCELERATE_MIXED_PRECISION", "no")) in ("fp16", "fp8"):
        raise UserError(
            f"ACCELERATE_MIXED_PRECISION is {precision}, but train.py supports only bf16 and fp32. Remove mixed_precision "
            "from the options and the config of accelerate launch, or unset the variable."
        )
    for name, fix in OWNED_BY_THE_RECIPE.items():
        value = os.environ.get(f"ACCELERATE_{name.upper()}", "auto")
        if value != "auto":
            raise UserError(
                f"The config of accelerate launch sets {name} to {value}, but only the recipe may set this value. {fix}"
            )
    path = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true" and path != "none":
        check_deepspeed_json(Path(path))
    if current_launcher() == LAUNCHERS["fsdp2"]:
        check_fsdp()


def check_deepspeed_json(path: Path) -> None:
    """Raise UserError if a DeepSpeed JSON is missing, invalid or has forbidden keys."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(
            f"{path} does not exist. Set deepspeed_config_file in the config of accelerate launch to a file in "
            "ds_configs/, and run the command from the repository root."
        ) from None
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON ({error}). Correct the file.") from None
    for key, value in (config | config.get("zero_optimization", {})).items():
        if key in REFUSED:
            raise UserError(f"{path}: {key} cannot be set, because {REFUSED[key]}. Remove the key.")
        if key in config and key not in KEYS:
            raise UserError(f"{path} has the key {key!r}, which DeepSpeed ignores. {did_you_mean(key, KEYS)}")
        for inner in value if key in BLOCKS and isinstance(value, dict) else ():
            if inner not in BLOCKS[key]:
                raise UserError(f"{path}: {key} has the unknown key {inner!r}. {did_you_mean(inner, BLOCKS[key])}")
    bf16: dict[str, Any] = config.get("bf16", {})
    owned = {key: config.get(key) for key in AUTO} | {"bf16.enabled": bf16.get("enabled", "auto")}
    # Without `gradient_clipping`, DeepSpeed clips at 1.0 and ignores the value of the recipe.
    for key, value in owned.items():
        if value != "auto":
            raise UserError(f'{path}: {key} must be "auto", because the recipe sets it.')
    if bf16.get(MASTERS):
        raise UserError(f"{path}: {MASTERS} turns off the fp32 master weights. Remove the key.")


# Required values of the block fsdp_config, by names without `fsdp_`, each with its reason. "none": not set.
FSDP = {
    "version": ("2", "version 1 of FSDP flattens weights"),
    "state_dict_type": ("FULL_STATE_DICT", "other forms need pickle or the same number of processes to be loaded"),
    "cpu_ram_efficient_loading": ("false", "every process initializes its weights from the seed"),
    "reshard_after_forward": ("true", "checkpoints and samples read the fp32 master weights between two steps"),
    "offload_params": ("false", "train.py keeps all weights on the devices"),
    "activation_checkpointing": ("false", "the recipe sets it (pass --activation_checkpointing after train.py)"),
    "auto_wrap_policy": ("none", "train.py shards each transformer block as one unit"),
}


def check_fsdp() -> None:
    """Raise UserError if FSDP has only one process or unsupported settings."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        raise UserError("FSDP needs two or more processes. Pass --num_processes 2, or launch with single_gpu.yaml.")
    for name, (needed, why) in FSDP.items():
        value = os.environ.get(f"FSDP_{name.upper()}", "none")
        if value != needed:
            fix = "Remove this setting" if needed == "none" else f"Set fsdp_{name}: {needed}"
            raise UserError(f"The config of accelerate launch sets fsdp_{name} to {value}. {fix}, because {why}.")

"""Check the config files of the launcher, and detect when the launcher dies.

accelerate 1.15 and deepspeed 0.19.8 silently ignore most mistakes in config files.
"""

import ctypes
import ipaddress
import json
import logging
import os
import socket
import sys
from pathlib import Path

import psutil

from gpt2_repro.checkpoints.side_process import end_with_parent
from gpt2_repro.errors import UserError, in_a_line
from gpt2_repro.launchers import FSDP2, current_launcher, deepspeed_json


logger = logging.getLogger(__name__)

PR_SET_CHILD_SUBREAPER = 36  # <linux/prctl.h>
# A real-time signal of Linux. Users, Slurm and libraries send SIGUSR1 and SIGUSR2.
LAUNCHER_DIED = 42
ANYWHERE = "192.0.2.1"  # an address that belongs to nobody (RFC 5737)

# Keys of a DeepSpeed JSON that must be "auto".
AUTO_KEYS = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",  # without this key, DeepSpeed clips at 1.0 and ignores the value of the recipe
)
# Keys of a DeepSpeed JSON that must be "auto" or missing.
AUTO_OR_MISSING_KEYS = ("bf16.enabled", "fp16.enabled")
# Keys that a DeepSpeed JSON cannot set, with the reason.
REFUSED_KEYS = {
    "optimizer": "the recipe sets the optimizer",
    "scheduler": "the recipe sets the learning-rate schedule",
    "amp": "the recipe sets the precision",
    "checkpoint": "train.py converts checkpoints if necessary",
    "compute_grad_norm": "train.py skips updates whose gradient norm is not finite",
}
# Keys of a DeepSpeed JSON that must be missing or false, with the reason.
UNSET_KEYS = {
    "zero_optimization.round_robin_gradients": "it stores the master weights in another order",
    "zero_optimization.parameter_alignment": "it stores the master weights in another order",
    "bf16.bf16_master_weights_and_grads": "it turns off the fp32 master weights",
}
# Values that the block fsdp_config needs: FSDP2, checkpoints without pickles, and fp32 weights on every device.
FSDP_VALUES = {
    "version": "2",
    "state_dict_type": "FULL_STATE_DICT",
    "cpu_ram_efficient_loading": "false",
    "reshard_after_forward": "true",
    "offload_params": "false",
    "activation_checkpointing": "false",
    "auto_wrap_policy": "none",
}


def choose_gloo_interface() -> None:
    """Let gloo use the network interface of NCCL_SOCKET_IFNAME, or the one that leads to the first of several machines.

    By default, gloo uses the address of the host name. On Debian and Ubuntu this is 127.0.1.1, and in containers it
    often does not lead to other machines. NCCL does not use the host name.
    """
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return
    interface = os.environ.get("NCCL_SOCKET_IFNAME", "")
    names = [name for _, name in socket.if_nameindex() if name.startswith(interface.removeprefix("="))]
    if interface and names:  # not for the forms ^NAME and NAME,NAME
        os.environ["GLOO_SOCKET_IFNAME"] = min(names, key=len)
    elif os.environ.get("WORLD_SIZE", "1") != os.environ.get("LOCAL_WORLD_SIZE", "1"):
        chosen = interface_to(os.environ.get("MASTER_ADDR", ""))
        if chosen is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = chosen
            logger.info("network interface of gloo: %s (GLOO_SOCKET_IFNAME)", chosen)


def interface_to(host: str) -> str | None:
    """Return the network interface that leads to a host, or None if unknown.

    On the host itself, where its name can stand for 127.0.1.1, the result is the interface with this address, that of
    the default route, or the only one.
    """
    interfaces: dict[str, str] = {}
    for name, addresses in psutil.net_if_addrs().items():
        for entry in addresses:
            if entry.family in (socket.AF_INET, socket.AF_INET6):
                interfaces[entry.address.partition("%")[0]] = name
    outside = {name for address, name in interfaces.items() if not ipaddress.ip_address(address).is_loopback}
    for target in (host, ANYWHERE):
        interface = interfaces.get(_own_address(target) or "")
        if interface in outside:
            return interface
    return outside.pop() if len(outside) == 1 else None


def _own_address(host: str) -> str | None:
    """Return the address from which this machine would send to a host. Nothing is sent."""
    try:
        family, kind, _, _, target = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            return probe.getsockname()[0].partition("%")[0]
    except OSError:
        return None


def end_with_launcher() -> None:
    """On Linux, make this process receive the signal LAUNCHER_DIED when the launcher dies, or now if it has died."""
    # torch's launcher sets the first variable. accelerate's launcher of a single process sets the second.
    is_elastic = "TORCHELASTIC_RUN_ID" in os.environ
    is_launched = is_elastic or "ACCELERATE_USE_CPU" in os.environ
    if not is_launched or sys.platform != "linux":
        return  # without Linux, the processes of a killed launcher train until they are ended by hand
    launcher = os.getppid()
    end_with_parent(LAUNCHER_DIED)
    has_died = os.getppid() != launcher  # before prctl was called
    if is_elastic and not _is_started_by_python():  # torch's launcher died while this process imported modules
        has_died = True
    if has_died:
        os.kill(os.getpid(), LAUNCHER_DIED)


def _is_started_by_python() -> bool:
    """Return whether the parent of this process, or a parent of it, is a Python process, as torch's launcher is.

    The parent can be another program, such as a shell script or a profiler. If the result is unknown, it is True.
    """
    for ancestor in psutil.Process().parents():
        try:
            program = program_of(ancestor)
        except PermissionError:  # a process of another user, so not the launcher
            continue
        except OSError:
            return True
        if program.startswith(("python", "pypy")):
            return True
    return False


def program_of(process: psutil.Process) -> str:
    """Return the file name of the program that a process runs. Raises OSError if it is unknown."""
    return Path(f"/proc/{process.pid}/exe").readlink().name


def adopt_orphans() -> None:
    """On Linux, make this process the parent of descendants that lose their parent."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def check_launcher() -> None:
    """Raise UserError for unsupported settings of `accelerate launch`. Set the network interface of gloo."""
    choose_gloo_interface()
    if os.environ.get("ACCELERATE_USE_CPU", "").lower() == "true":
        raise UserError("`accelerate launch --cpu` is not supported. Pass --use_cpu after train.py instead.")
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if precision in ("fp16", "fp8"):
        fix = "Remove mixed_precision from its options and config, or unset the variable. For fp16 pass --precision fp16."
        raise UserError(f"ACCELERATE_MIXED_PRECISION is {precision}, but the recipe sets the precision. {fix}")
    for name in ("gradient_clipping", "gradient_accumulation_steps"):
        value = os.environ.get(f"ACCELERATE_{name.upper()}", "auto")
        if value != "auto":
            raise UserError(f"The config of accelerate launch sets {name} to {value}, but only the recipe may set it.")
    path = deepspeed_json()
    if path is not None:
        check_deepspeed_json(path)
    if current_launcher() == FSDP2:
        check_fsdp()


def check_deepspeed_json(path: Path) -> None:
    """Raise UserError if a DeepSpeed JSON is missing, invalid or sets what the recipe sets."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"The DeepSpeed JSON {path} cannot be read: {in_a_line(error)}") from None
    zero = config.get("zero_optimization") if isinstance(config, dict) else None
    if not isinstance(zero, dict) or zero.get("stage") not in (1, 2, 3):
        raise UserError(f"{path} needs the section zero_optimization with the stage 1, 2 or 3.")
    flat = dict(config)
    for name, section in config.items():
        if isinstance(section, dict):
            for key, value in section.items():
                flat[f"{name}.{key}"] = value
    for key, reason in REFUSED_KEYS.items():
        if key in flat or f"zero_optimization.{key}" in flat:
            raise UserError(f"{path}: {key} cannot be set, because {reason}.")
    for key in (*AUTO_KEYS, *AUTO_OR_MISSING_KEYS):
        is_missing = key not in flat
        if is_missing and key in AUTO_OR_MISSING_KEYS:
            continue
        if is_missing or flat[key] != "auto":
            raise UserError(f'{path}: {key} must be "auto", because the recipe sets it.')
    # In fp16, gradients below 6e-8 become 0, and Adam does not move these weights.
    for key in ("communication_data_type", "data_types.grad_accum_dtype"):
        if flat.get(key) in ("fp16", "half", "float16"):
            raise UserError(f"{path}: {key} cannot be {flat[key]}, because small gradients would become 0.")
    for key, reason in UNSET_KEYS.items():
        if flat.get(key):
            raise UserError(f"{path}: {key} cannot be set, because {reason}.")


def check_fsdp() -> None:
    """Raise UserError if FSDP has only one process or unsupported settings."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        raise UserError("FSDP needs two or more processes. Pass --num_processes 2, or run python train.py.")
    for name, needed in FSDP_VALUES.items():
        value = os.environ.get(f"FSDP_{name.upper()}", "none")
        if value.lower() != needed.lower():
            raise UserError(f"fsdp_config has fsdp_{name} {value}, but train.py needs {needed}.")

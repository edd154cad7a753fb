"""Find the accelerators of this machine and their capabilities."""

import contextlib
import dataclasses
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import psutil

from gpt2_repro import cgroups
from gpt2_repro.errors import UserError
from gpt2_repro.files import read_table


PEAK_FLOPS: dict[str, float] = {name: 1e12 * peak for name, peak in read_table(__file__, "peak_tflops.yaml").items()}

USE_CPU = "--use_cpu to train on the CPU, or use recipes/own_text.yaml, whose model fits a CPU"


@dataclasses.dataclass(frozen=True)
class Accelerator:
    """The GPUs or the CPU that a run computes on."""

    kind: str  # "cuda" (NVIDIA, and AMD with ROCm), "mps" (Apple) or "cpu"
    name: str
    count: int
    peak_flops: float | None  # of one device, see PEAK_FLOPS; None if unknown
    memory_bytes: int | None


def peak_flops(name: str) -> float | None:
    """Return the peak in PEAK_FLOPS of the GPU called `name`, or None if unknown."""
    for part, peak in PEAK_FLOPS.items():
        if is_named(part, name):
            return peak
    return None


def is_named(part: str, name: str) -> bool:
    """Return whether a GPU name contains `part` ("A100"). False for MIG and variants."""
    variants = ("MIG", "Laptop", "Max-Q", "SUPER", "3090 Ti", "4090 D", "5090 D", "GH200", "GB200")
    if any(word in name for word in variants):
        return False
    return re.search(rf"\b{re.escape(part)}\b", name, re.IGNORECASE) is not None


def gpu_kind() -> str | None:
    """Return torch's name of the kind of GPU: "cuda" (NVIDIA, and AMD with ROCm), "mps" (Apple), or None."""
    import torch

    if torch.cuda.is_available():
        return "cuda"
    if torch.backends.mps.is_available():
        return "mps"
    return None


def find_accelerator(*, use_cpu: bool = False) -> Accelerator:
    """Return the visible GPUs, or the CPU if no GPU is visible or `use_cpu` is set."""
    import torch

    kind = None if use_cpu else gpu_kind()
    if kind == "cuda":
        gpu = torch.cuda.get_device_properties(0)
        return Accelerator(kind, gpu.name, torch.cuda.device_count(), peak_flops(gpu.name), gpu.total_memory)
    if kind == "mps":
        return Accelerator(kind, torch.backends.mps.get_name(), 1, None, torch.mps.recommended_max_memory())
    return Accelerator("cpu", platform.processor() or platform.machine(), cpu_cores(), None, None)


def cpu_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    return min([cores, *cgroups.cpu_limits()])


def total_memory() -> int:
    """Return the host memory in bytes, within the limits of the container or job."""
    limits = [limit for limit, _ in cgroups.memory_limits()]
    return min([psutil.virtual_memory().total, *limits])


def available_memory() -> int:
    """Return the free host memory in bytes, within the limits of the container or job."""
    free = [rest for _, rest in cgroups.memory_limits()]
    return min([psutil.virtual_memory().available, *free])


def uses_cpu(*, use_cpu: bool, accept_any_hardware: bool, cpu_option: str = USE_CPU) -> bool:
    """Return whether to compute on the CPU, and not on the GPU.

    Without `use_cpu`, raises UserError if torch cannot use an NVIDIA device that is present. If there is no GPU, raises
    UserError or `accept_any_hardware` selects the CPU. The message names `cpu_option`.
    """
    import torch

    if use_cpu:
        return True
    if gpu_kind():
        return False
    hides_gpus = os.environ.get("CUDA_VISIBLE_DEVICES") == ""
    driver = None if hides_gpus else nvidia_driver()
    if driver is not None:
        cuda = torch.version.cuda
        fix = "Install torch with CUDA"
        if cuda:
            fix = "Update the driver, install torch for an older CUDA version"
        versions = f"torch {torch.__version__} (CUDA {cuda}) cannot use the NVIDIA device with driver {driver}"
        raise UserError(f"{versions}. {fix}, or pass {cpu_option}.")
    if not accept_any_hardware:
        raise UserError(f"No GPU found. Pass {cpu_option}.")
    return True


def check_processes(num_processes: int) -> None:
    """Raise UserError if this machine has fewer GPUs than processes."""
    import torch

    gpus = 1
    if gpu_kind() == "cuda":
        gpus = torch.cuda.device_count()
    if num_processes > gpus:
        raise UserError(f"{num_processes} processes need as many GPUs. There are {gpus}. Pass --num_processes {gpus}.")


def choose_precision(requested: str, *, use_cpu: bool, accept_any_hardware: bool) -> tuple[str, str]:
    """Return the precision of matrix products ("bf16", "fp16" or "fp32"), and the reason.

    Args:
        requested: one of these, or "auto": bf16 if the device supports it, otherwise fp16 on a GPU and fp32 on a CPU.

    A GPU without bf16 uses fp32 instead of bf16 if `accept_any_hardware`, and raises UserError otherwise.
    """
    import torch
    from transformers.utils import is_torch_bf16_available_on_device

    if requested == "fp32":
        return "fp32", "fp32, as set in the recipe"
    if use_cpu or gpu_kind() == "mps":
        if requested == "fp16":  # accelerate (1.15) would ignore fp16 on a CPU without a message
            return "fp32", "fp32, because fp16 with loss scaling needs an NVIDIA or AMD GPU"
        has_bf16 = cpu_multiplies_bf16() if use_cpu else is_torch_bf16_available_on_device("mps")
        if has_bf16:
            return "bf16", "bf16 with fp32 master weights"
        return "fp32", "fp32, because this device has no bf16 instructions"
    has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    if requested == "fp16" or (requested == "auto" and not has_bf16):
        return "fp16", "fp16 with fp32 master weights and loss scaling"
    if not has_bf16:
        if accept_any_hardware:
            return "fp32", "fp32, because this GPU does not support bf16"
        raise UserError(f"{torch.cuda.get_device_name()} does not support bf16. Pass --precision fp16.")
    return "bf16", "bf16 with fp32 master weights"


def choose_compile(requested: bool | None, *, use_cpu: bool, accept_any_hardware: bool) -> bool:
    """Return whether to use torch.compile, which None in the recipe uses on CUDA GPUs only.

    None does not compile without the tools that `compiler_obstacle` looks for. Otherwise, raises UserError if it should
    be used but cannot work, except for None with `accept_any_hardware`.
    """
    if requested is False or (requested is None and (use_cpu or gpu_kind() == "mps")):
        return False
    fix = "or pass --torch_compile false. Without torch.compile, a GPU trains about half as fast."
    if computes_nan_if_compiled(use_cpu=use_cpu):
        if requested or not accept_any_hardware:
            problem = "Code compiled by torch 2.10 computes NaN on A100 GPUs. Install torch 2.9 or 2.11"
            raise UserError(f"{problem}, {fix}")
        return False
    obstacle = compiler_obstacle(use_cpu=use_cpu)
    if obstacle is not None and requested:
        raise UserError(f"torch.compile needs {obstacle}, {fix}")
    return obstacle is None


def computes_nan_if_compiled(*, use_cpu: bool) -> bool:
    """Return whether compiled code computes NaN on this GPU with this version of torch."""
    import torch

    return torch.__version__.startswith("2.10.") and "A100" in find_accelerator(use_cpu=use_cpu).name


def compiler_obstacle(*, use_cpu: bool) -> str | None:
    """Return what torch.compile and Triton need and this machine lacks, and how to install it, or None."""
    # On a CPU, inductor compiles C++. On a GPU, Triton compiles its launchers in C.
    compilers = ["gcc", "clang"]
    variable = "CC"
    if use_cpu:
        compilers = ["g++"]
        variable = "CXX"
    has_compiler = any(shutil.which(compiler) for compiler in compilers)
    if not has_compiler and not os.environ.get(variable):
        return f"a compiler. Install {' or '.join(compilers)}"
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        return "Python's headers. Install python3-dev"
    if not use_cpu and gpu_kind() == "cuda" and importlib.util.find_spec("triton") is None:
        return "triton. Install triton"
    return None


def nvidia_driver() -> str | None:
    """Return the NVIDIA driver's version (or "unknown"), or None without a device."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.SubprocessError, IndexError):  # if it hangs, look for the device
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
        return done.stdout.split()[0]
    if Path("/dev/nvidia0").exists():
        return "unknown"
    return None


def cpu_multiplies_bf16() -> bool:
    """Return whether this CPU has bf16 matrix instructions."""
    cpus = Path("/proc/cpuinfo")
    if not cpus.is_file():
        return False
    flags = cpus.read_text(encoding="utf-8").split()
    return any(flag in flags for flag in ("avx512_bf16", "amx_bf16", "bf16"))


def demo_processes() -> int:
    """Return the number of processes for `make demo`."""
    accelerator = find_accelerator()
    if accelerator.kind == "cuda":
        processes = 1  # a divisor of the demo's 8 rows per step
        while processes < 8 and 2 * processes <= accelerator.count:
            processes *= 2
        return processes
    return 2 if platform.system() == "Linux" else 1  # several processes need DeepSpeed, which supports Linux only

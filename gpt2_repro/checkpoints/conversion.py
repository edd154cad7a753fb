"""Convert a DeepSpeed checkpoint for another number of processes."""

import os
import pkgutil
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from gpt2_repro.checkpoints.manifest import checkpoint_size
from gpt2_repro.errors import RunFailed, UserError


# The classes that deepspeed 0.19.8 pickles into a checkpoint, apart from tensors and plain containers.
DEEPSPEED_CLASSES = {
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
}
OF_ADAM = {"step", "exp_avg", "exp_avg_sq"}  # the state of the optimizer that ds_to_universal converts
SHARD = re.compile(r"zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt")
SPACE = 1.2  # disk space of a conversion, as a multiple of the checkpoint's size


def require_space(checkpoint: Path, *, reclaimable: int = 0) -> None:
    """Raise UserError if the disk has too little space to convert a checkpoint.

    `reclaimable` is the size in bytes of files that are deleted before the conversion.
    """
    needed = SPACE * checkpoint_size(checkpoint)
    missing = needed - shutil.disk_usage(checkpoint).free - reclaimable
    if missing > 0:
        problem = f"Converting {checkpoint} to another number of processes needs {missing / 1e6:,.0f} MB more free"
        fix = "Free this space, or start as many processes as the run had when it saved the checkpoint."
        raise UserError(f"{problem} disk space. {fix}")


def convert(checkpoint: Path, copy: Path, *, step: int) -> None:
    """Convert a DeepSpeed checkpoint to universal form, with one file per weight.

    Args:
        copy: the folder to create.

    Raises UserError if the disk has too little space for the copy, and RunFailed if the conversion fails.
    """
    require_space(checkpoint)
    copy.mkdir(parents=True)
    for path in checkpoint.iterdir():
        if not path.name.startswith("latest"):
            (copy / path.name).symlink_to(path.resolve())
    folder = checkpoint / f"global_step{step}"
    universal = copy / f"global_step{step}_universal"
    command = [
        sys.executable,
        "-m",
        "deepspeed.checkpoint.ds_to_universal",
        "--inject_missing_state",
        "--input_folder",
        str(folder),
        "--output_folder",
        str(universal),
    ]
    environment = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    for name, value in os.environ.items():
        is_of_launcher = name.startswith(("LOCAL_", "TORCHELASTIC_"))
        if not is_of_launcher and name not in environment:
            environment[name] = value
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RunFailed(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    carry_further_states(folder, universal / "zero")


def carry_further_states(folder: Path, universal: Path) -> None:
    """Add the states that are not Adam's, such as averaged weights, to a converted ZeRO-1 or ZeRO-2 checkpoint.

    ds_to_universal (0.19.8) leaves them out, but DeepSpeed loads every file in the folder of a weight.

    Args:
        folder: the folder `global_stepN` of the checkpoint, with one file per process.
        universal: the converted folder, with one folder per weight.
    """
    import torch

    parts: dict[tuple[str, str], list[torch.Tensor]] = {}
    for path in _shards(folder):
        for key, part in _further_states(path).items():
            parts.setdefault(key, []).append(part)
    for (name, state), pieces in parts.items():
        master = torch.load(universal / name / "fp32.pt", weights_only=True, mmap=True)
        whole = torch.cat(pieces).view(master["param"].shape)
        torch.save(master | {"param": whole}, universal / name / f"{state}.pt")


def _shards(folder: Path) -> list[Path]:
    """Return the files with the state of the optimizer, in the order of the processes."""
    by_rank: dict[int, Path] = {}
    for path in folder.glob("*_optim_states.pt"):
        match = SHARD.search(path.name)
        if match is not None:
            by_rank[int(match[1])] = path
    return [by_rank[rank] for rank in sorted(by_rank)]


def _further_states(path: Path) -> dict[tuple[str, str], Any]:
    """Return one process's flat part of each state that is not Adam's, by the names of the weight and the state."""
    import torch

    classes = [pkgutil.resolve_name(name) for name in DEEPSPEED_CLASSES]
    with torch.serialization.safe_globals(classes):
        saved = torch.load(path, weights_only=True, mmap=True, map_location="cpu")["optimizer_state_dict"]
    if "param_slice_mappings" not in saved:  # ZeRO-3, which supports only Adam's
        return {}
    parts: dict[tuple[str, str], torch.Tensor] = {}
    for group, fragments in enumerate(saved["param_slice_mappings"]):
        states = saved["base_optimizer_state"]["state"].get(group, {})
        for state in states.keys() - OF_ADAM:
            for name, fragment in fragments.items():
                parts[name, state] = states[state].narrow(0, fragment.start, fragment.numel)
    return parts

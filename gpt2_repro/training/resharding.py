"""DeepSpeed keeps one shard a process; for another number of processes there is its universal form, weight by weight."""

import logging
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from gpt2_repro.errors import UserError
from gpt2_repro.run_record.checkpoints import size
from gpt2_repro.training.resuming import Start


logger = logging.getLogger(__name__)


def loadable(start: Start, *, staging: Path, processes: int, accelerator: Any) -> str | None:
    """The folder to load from: the checkpoint, or its copy in universal form where another number of processes wrote it.

    A collective. DeepSpeed is told of the form; the copy lies in `staging`, which the next save empties.
    """
    written_by = start.manifest.get("deepspeed_processes")
    if start.checkpoint is None or written_by in (None, processes):
        return None if start.checkpoint is None else str(start.checkpoint)
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
    """Write a DeepSpeed checkpoint in universal form, every weight by itself, beside links to its other files.

    By DeepSpeed's own converter, in a process that sees no GPU. Raises UserError where there is no room for the copy.
    """
    needed, free = 1.2 * size(checkpoint), shutil.disk_usage(checkpoint).free
    if free < needed:
        raise UserError(
            f"{checkpoint} has to be converted for this number of processes, and {(needed - free) / 1e6:,.0f} MB are missing "
            "for it on the disk: free them, or start as many processes as before"
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

"""Commands as a user types them."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any


ROOT = Path(__file__).parents[1]


def start_command(words: tuple[object, ...], environment: dict[str, str], **streams: Any) -> subprocess.Popen[str]:
    """A command as a user types it in the project's root: `python`, `launch N` (ZeRO-1) or `torchrun N` first."""
    command, *rest = map(str, words)
    python = [sys.executable]
    if command == "launch":
        count, *rest = rest
        zero1 = ["--config_file", "accelerate_configs/zero1.yaml", "--num_processes", count]
        python += ["-m", "accelerate.commands.launch", *zero1, "--main_process_port", "0"]
    elif command == "torchrun":
        count, *rest = rest
        python += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", count]
    elif command == "bash":
        python = ["bash"]
    settings = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHON": sys.executable} | environment
    return subprocess.Popen(
        [*python, *rest],
        cwd=ROOT,
        env=os.environ | settings,
        stdin=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        **streams,
    )

"""Start the commands of the project in subprocesses, as a user would."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil


ROOT = Path(__file__).parents[1]


ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHON": sys.executable}
LAUNCHERS = {"launch": "zero1", "ddp": "ddp", "zero2": "zero2", "zero3": "zero3", "fsdp2": "fsdp2"}


def start_command(words: tuple[object, ...], environment: dict[str, str], **streams: Any) -> subprocess.Popen[str]:
    """Start a command in the root folder of the project, as a user would.

    `words` starts with `python`, `bash`, or a launcher and its number of processes. The launchers are `launch`
    (accelerate with ZeRO-1), `ddp`, `zero2`, `zero3`, `fsdp2` and `torchrun`. `environment` is added to the current
    environment variables. `streams` contains further arguments of subprocess.Popen.
    """
    command = ["bash", *map(str, words[1:])] if words[0] == "bash" else [sys.executable, *words_of(words)]
    variables = os.environ | ENVIRONMENT | environment
    return subprocess.Popen(
        command, cwd=ROOT, env=variables, stdin=subprocess.DEVNULL, text=True, start_new_session=True, **streams
    )


def start_cold(
    words: tuple[object, ...], environment: dict[str, str], output: Path, errors: Path | None = None
) -> subprocess.Popen[str]:
    """Start a command, and write stdout and stderr to files, or both to `output`."""
    with output.open("w", encoding="utf-8") as out, (errors or Path(os.devnull)).open("w", encoding="utf-8") as err:
        return start_command(words, environment, stdout=out, stderr=err if errors else out)


def words_of(words: tuple[object, ...]) -> list[str]:
    """Return the arguments of the `python` process that start_command(words) starts."""
    command, *rest = map(str, words)
    if command in LAUNCHERS:
        config = f"accelerate_configs/{LAUNCHERS[command]}.yaml"
        launcher = ("--config_file", config, "--main_process_port", "0", "--num_processes")
        return ["-m", "accelerate.commands.launch", *launcher, *rest]
    if command == "torchrun":
        return ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", *rest]
    return rest


def kill_all(pid: int) -> None:
    """Kill the process `pid` and all its descendants."""
    # A signal to the process group is not enough, because the workers run in separate sessions.
    with contextlib.suppress(psutil.NoSuchProcess):
        processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

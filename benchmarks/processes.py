"""Run commands of this repository, and kill processes with all their descendants."""

import contextlib
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import psutil


ROOT = Path(__file__).parents[1]


class Finished(NamedTuple):
    """Start time, end time and peak GPU memory of a command that has ended."""

    began: float  # seconds since the epoch
    ended: float
    peak_mib: int  # peak of the used memory of any GPU; 0 without a GPU
    killed: bool

    @property
    def seconds(self) -> float:
        return self.ended - self.began


def run_python(words: list[str], *, log: Path, timeout: float, stop: Callable[[], bool] = lambda: False) -> Finished:
    """Run `python WORDS` in the repository root until it ends or `stop` returns True.

    If `stop` returns True, the process and its descendants are killed.
    Exits with an error if the command fails or takes longer than `timeout` seconds.
    """
    began, peak, looked, killed = time.time(), 0, 0.0, False
    with log.open("w", encoding="utf-8") as out:
        process = subprocess.Popen([sys.executable, *words], cwd=ROOT, stdout=out, stderr=subprocess.STDOUT)
    try:
        while process.poll() is None and not killed:
            if time.time() - began > timeout:
                sys.exit(f"The command did not finish within {timeout} s. See {log}.")
            if time.time() - looked > 2:
                peak, looked = max(peak, gpu_memory()), time.time()
            time.sleep(0.02)
            killed = stop()
    finally:
        ended = time.time()
        kill_all(process)
    if process.returncode and not killed:
        end = log.read_text(encoding="utf-8")[-3000:]
        sys.exit(f"The command failed with exit code {process.returncode}. See {log}.\n{end}")
    return Finished(began, ended, peak, killed)


def run_captured(
    command: list[str], *, timeout: float, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command in the repository root, and return its exit code and output.

    Raises subprocess.TimeoutExpired after `timeout` seconds. The command and all of its descendants are then killed.
    """
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=pipe, stderr=pipe, text=True)
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    finally:
        kill_all(process)  # subprocess.run would leave the processes of a launcher running
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def kill_all(process: subprocess.Popen) -> None:
    """Kill a process and all of its descendants with SIGKILL."""
    # Not the process group, because a launcher's workers are in other process groups.
    tree: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        tree = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for member in tree:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait()
    while any(member.is_running() and member.status() != psutil.STATUS_ZOMBIE for member in tree):
        time.sleep(0.02)


def gpu_memory() -> int:
    """Return the highest memory use of any GPU in MiB, or 0 without nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return 0
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    output = subprocess.run(query, capture_output=True, text=True).stdout.split()
    return max((int(word) for word in output if word.isdigit()), default=0)

"""Run commands of this repository, read their logs, and kill processes with all their descendants."""

import contextlib
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import psutil


ROOT = Path(__file__).parents[1]
KILL_SECONDS = 15  # a process that waits for a device may not end at once
SAVED = re.compile(r"([\d.,]+) MB in ([\d.]+) s, training paused for ([\d.]+) s")  # in the log of train.py


class Finished(NamedTuple):
    """Start time, end time and peak GPU memory of a command that has ended."""

    began: float  # seconds since the epoch
    ended: float
    peak_mib: int  # peak of the used memory of any GPU; 0 without a GPU
    killed: bool

    @property
    def seconds(self) -> float:
        return self.ended - self.began


def run_python(words: list[str], **options: Any) -> Finished:
    """Run `python WORDS` with the options of `run_logged`."""
    return run_logged([sys.executable, *words], **options)


def run_logged(
    command: list[str],
    *,
    log: Path,
    timeout: float,
    stop: Callable[[], bool] = lambda: False,
    cwd: Path = ROOT,
    env: dict[str, str] | None = None,
) -> Finished:
    """Run a command until it ends or `stop` returns True. Its output goes to the file `log`.

    If `stop` returns True, the process and its descendants are killed.
    Exits with an error if the command fails or takes longer than `timeout` seconds.
    """
    began, peak, looked, killed = time.time(), 0, 0.0, False
    with log.open("w", encoding="utf-8") as out:
        process = subprocess.Popen(command, cwd=cwd, env=env, stdout=out, stderr=subprocess.STDOUT)
    try:
        while process.poll() is None and not killed:
            if time.time() - began > timeout:
                sys.exit(f"The command did not finish within {timeout:.0f} s. See {log}.")
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


def logged(run: Path, key: str = "loss") -> dict[int, dict[str, Any]]:
    """Return the entries of the metrics of a run that have this key, by step."""
    from gpt2_repro.run_record.layout import METRICS  # not needed by the contenders of data_preparation.py

    path = run / METRICS
    # The last line may be incomplete.
    lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.is_file() else []
    return {event["step"]: event for event in map(json.loads, lines) if key in event}


def kill_all(process: subprocess.Popen) -> None:
    """Kill a process and all of its descendants with SIGKILL."""
    # Not the process group, because a launcher's workers are in other process groups.
    tree: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        tree = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for member in tree:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    deadline = time.monotonic() + KILL_SECONDS
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(KILL_SECONDS)
    while any(is_alive(member) for member in tree) and time.monotonic() < deadline:
        time.sleep(0.02)


def is_alive(process: psutil.Process) -> bool:
    """Return whether a process runs. It may end at any time, also between two questions."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def gpu_query(fields: str) -> list[str]:
    """Return the values of fields of nvidia-smi, one line per GPU, or [] without nvidia-smi or a GPU."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=10)
    except subprocess.TimeoutExpired:
        return []
    return [] if done.returncode else done.stdout.splitlines()


def gpu_memory() -> int:
    """Return the highest memory use of any GPU in MiB, or 0 without a GPU."""
    return max((int(line) for line in gpu_query("memory.used") if line.isdigit()), default=0)

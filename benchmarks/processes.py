"""Run a command of this repository to its end, or kill it with all that it started."""

import dataclasses
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil


ROOT = Path(__file__).parents[1]


@dataclasses.dataclass(frozen=True)
class Finished:
    """A command that is over."""

    began: float  # seconds since the epoch
    ended: float
    peak_mib: int  # the largest used memory of a GPU that was seen, 0 without one
    killed: bool

    @property
    def seconds(self) -> float:
        return self.ended - self.began


def run_python(words: list[str], *, log: Path, timeout: float, stop: Callable[[], bool]) -> Finished:
    """Run `python WORDS` in the repository's root until it ends, or until `stop` says so: then everything is killed.

    Exits with the end of the log where the command fails or is not done in `timeout` seconds.
    """
    began, peak, looked, killed = time.time(), 0, 0.0, False
    with log.open("w") as out:
        process = subprocess.Popen([sys.executable, *words], cwd=ROOT, stdout=out, stderr=subprocess.STDOUT)
    try:
        while process.poll() is None and not killed:
            if time.time() - began > timeout:
                sys.exit(f"not done in {timeout} s: see {log}")
            if time.time() - looked > 2:
                peak, looked = max(peak, gpu_memory()), time.time()
            time.sleep(0.02)
            killed = stop()
    finally:
        ended = time.time()
        kill_all(process)
    if process.returncode and not killed:
        sys.exit(f"exit code {process.returncode}: see {log}\n{log.read_text()[-2000:]}")
    return Finished(began, ended, peak, killed)


def kill_all(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL a process and all under it, in one go: a launcher's workers have process groups of their own."""
    try:
        tree = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for member in tree:
        try:
            member.kill()
        except psutil.NoSuchProcess:
            continue
    process.wait()
    while any(member.is_running() and member.status() != psutil.STATUS_ZOMBIE for member in tree):
        time.sleep(0.02)


def gpu_memory() -> int:
    """The largest used memory of a GPU in MiB, 0 where nvidia-smi does not tell."""
    if shutil.which("nvidia-smi") is None:
        return 0
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    said = subprocess.run(query, capture_output=True, text=True).stdout.split()
    return max((int(word) for word in said if word.isdigit()), default=0)

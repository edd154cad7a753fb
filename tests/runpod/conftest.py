"""Simulate a RunPod pod with stub programs that record their arguments."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[2]
KEY = "rpa_SECRET"
# A command that logs its arguments. It also logs "curl has the key" if it is curl and gets the API key on standard
# input. It prints the variable OUT_<name> and exits with the code in the variable STUB_<name>.
STUB = """#!/usr/bin/env bash
name=$(basename "$0")
echo "$name $*" >>"$CALLS"
if [[ $name == curl && $* == *--config* ]]; then read -r given; [[ $given == *"Bearer $OUR_KEY\\"" ]] && echo "curl has the key" >>"$CALLS.keys"; fi
code=STUB_${name//-/_} output=OUT_${name//-/_}
[[ -n ${!output:-} ]] && echo "${!output}"
exit "${!code:-0}"
"""
# A `sleep` that ends when the test calls Pod.wake.
SLEEP = """#!/usr/bin/env bash
echo "$1" >>"$CALLS.sleeps"
until [[ $1 == 0 || -e $TMPDIR/wake ]]; do /bin/sleep 0.02; done
"""
# A `python` for all Python commands of the scripts. It logs its arguments, creates virtual environments that contain
# this stub, simulates training, and writes the path of the run directory for the scripts.
PYTHON = """#!/usr/bin/env bash
echo "python $*" >>"$CALLS"
case "$*" in
  "- "*) echo "${DIFFERS:-0}" ;; # the comparison of a bucket
  "-m venv"*) [[ -n ${NO_VENV:-} ]] && exit 1; mkdir -p "${!#}/bin"; cp "$0" "${!#}/bin/python" ;;
  *"--requirement"*/requirements.txt) exit "${INSTALL:-0}" ;;
  *"importlib.metadata"*) echo 2.9.1+cu128 ;;
  "-m gpt2_repro.preflight") [[ -z ${SLOW_PREFLIGHT:-} ]] || sleep 600 ;;
  "-m gpt2_repro.evaluation"*) exit "${EVALUATION:-0}" ;;
  "-m gpt2_repro.supervise"*)
    if [[ -n ${RUN:-} ]]; then
      mkdir -p "$RUN"
      printf '{\\n  "state": "%s"\\n}\\n' "${STATE:-complete}" >"$RUN/run_status.json"
      printf %s "$RUN" >"$GPT2_REPRO_RUN_NOTE"
    fi
    if [[ -n ${TRAINING:-} ]]; then exec bash -c "$TRAINING"; fi ;;
esac
exit 0
"""


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "The condition was still false after 60 s."
        time.sleep(0.02)


class Pod:
    """A simulated pod that runs the scripts of runpod/."""

    def __init__(self, folder: Path) -> None:
        # The space in the path tests the quoting.
        self.folder, self.workspace = folder, folder / "work space"
        self.stubs, self._calls = folder / "bin", folder / "calls"
        self.stubs.mkdir()
        for name in ("runpodctl", "curl", "hf", "rsync", "tmux", "nvidia-smi"):
            self.stub(name, STUB)
        self.stub("python", PYTHON)
        self.stub("sleep", SLEEP)
        self.environment = {
            "PATH": f"{self.stubs}:{os.environ['PATH']}",
            "HOME": str(folder),
            "TMPDIR": str(folder),
            "CALLS": str(self._calls),
            "PYTHON": "python",
            "WORKSPACE": str(self.workspace),
            "INIT_ENVIRON": "/dev/null",
            "RUNPOD_POD_ID": "pod1",
            "RUNPOD_API_KEY": KEY,
            "OUR_KEY": KEY,
            "STOP_WAIT": "0",
            "STOP_ROUNDS": "1",
            "SYNC_PAUSE": "0",
        }

    def stub(self, name: str, script: str) -> None:
        """Replace the command `name` by a shell script with the text `script`."""
        (self.stubs / name).write_text(script, encoding="utf-8")
        (self.stubs / name).chmod(0o755)

    def wake(self) -> None:
        """Make all current and later `sleep` commands of the scripts end at once."""
        (self.folder / "wake").touch()

    def sleeps(self) -> list[int | str]:
        path = Path(f"{self._calls}.sleeps")
        words = path.read_text(encoding="utf-8").split() if path.exists() else []
        return [int(word) if word.isdecimal() else word for word in words]

    def start(self, script: str, *words: object, **variables: str | None) -> subprocess.Popen[str]:
        """Start a script of runpod/ with changed environment variables (None: unset)."""
        environment = {name: text for name, text in (self.environment | variables).items() if text is not None}
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        command = ["bash", str(ROOT / "runpod" / script), *map(str, words)]
        return subprocess.Popen(command, env=environment, text=True, start_new_session=True, **pipes)

    def run(self, script: str, *words: object, **variables: str | None) -> tuple[int, str]:
        """Run a script of runpod/ and return its exit code and output."""
        with self.start(script, *words, **variables) as process:
            output, _ = process.communicate(timeout=60)
        assert KEY not in output
        return process.returncode, output

    def train(self, *words: object, **variables: str | None) -> tuple[int, str]:
        """Run run_and_stop.sh with a simulated training.

        Returns the exit code, and the output and log, of run_and_stop.sh.
        """
        variables = {"RUN": str(self.workspace / "runs" / "mine")} | variables
        training = ("accelerate", "launch", "train.py", "--usd_per_hour=1")
        code, output = self.run("run_and_stop.sh", *words, "--max_usd", 20, "--", *training, **variables)
        return code, output + self.log("run-*.log")

    def calls(self, start: str = "") -> list[str]:
        lines = self._calls.read_text(encoding="utf-8").splitlines() if self._calls.exists() else []
        return [line for line in lines if line.startswith(start)]

    def log(self, name: str) -> str:
        return "".join(path.read_text(encoding="utf-8") for path in sorted((self.workspace / "logs").glob(name)))

    def processes(self, words: str = "", *, leads: bool = False) -> list[int]:
        """Return the ids of this pod's processes whose command line contains `words`.

        leads: only processes that lead a session. Before a shell's child starts its program, both have the same words.
        """
        mark, ids = f"CALLS={self._calls}\0".encode(), []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                started = (process / "cmdline").read_bytes().replace(b"\0", b" ")
                if mark in (process / "environ").read_bytes() and words.encode() in started:
                    ids += [pid for pid in [int(process.name)] if not leads or os.getsid(pid) == pid]
        return ids


@pytest.fixture
def pod(tmp_path: Path) -> Iterator[Pod]:
    pod = Pod(tmp_path)
    yield pod
    # Armed deadlines continue after the script that started them, as intended. End them here.
    while left := pod.processes():
        for process in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
    # The API key must not be in any file: not in a call, a log or a settings file.
    for path in tmp_path.rglob("*"):
        if path.is_file():
            assert KEY.encode() not in path.read_bytes(), path

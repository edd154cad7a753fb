"""Start a training again when it has crashed, within bounds. The only restart loop there is.

    python -m gpt2_repro.supervise -- accelerate launch --config_file accelerate_configs/zero1.yaml train.py
    python -m gpt2_repro.supervise --attempts 5 -- python train.py recipes/demo.yaml

It ends when the run is complete or was stopped, by a signal, a budget or --stop_at_step; when the command line is wrong;
when updates were not finite too often; and after --attempts crashes without a newer checkpoint. Signals are passed on.
"""

import argparse
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType
from typing import BinaryIO

import psutil

from gpt2_repro import cli
from gpt2_repro.cli import CommandParser
from gpt2_repro.errors import RunFailed, UserError
from gpt2_repro.run_record import RunRecord
from gpt2_repro.run_record.status import RunStatus
from gpt2_repro.supervision import FOLDER, MISTAKE, RUN, SINCE, noted
from gpt2_repro.training.launcher import adopt_orphans


logger = logging.getLogger(__name__)

LONGEST_WAIT = 300.0  # seconds between two attempts
KEEP_RUN = "GPT2_REPRO_RUN_NOTE"  # names a file that keeps the run directory's name, for who started the supervisor
LAUNCHERS_PATIENCE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"  # seconds from a signal to SIGKILL, 30 if nobody sets it


def main(argv: list[str]) -> None:
    """Run the command until it is done. Raises UserError for a command line without one, RunFailed when it gives up."""
    parser = CommandParser(prog="python -m gpt2_repro.supervise", description=__doc__)
    parser.add_argument("--attempts", type=int, default=3, help="Crashes in a row without a newer checkpoint. (3)")
    parser.add_argument("--wait", type=float, default=10.0, help="Seconds to the first restart, then doubled. (10)")
    parser.add_argument("--grace", type=float, default=60.0, help="Seconds for orphaned processes to end. (60)")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- and the command that trains.")
    args = parser.parse(argv)
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        raise UserError("No command given. Pass one: python -m gpt2_repro.supervise -- accelerate launch … train.py")
    # The run leaves notes for this process here. If this process is killed, a few bytes stay.
    with tempfile.TemporaryDirectory(prefix="supervise-") as notes:
        Supervisor(command, Path(notes), args).run()


class Supervisor:
    """One command, its restarts and their bounds."""

    def __init__(self, command: list[str], notes: Path, options: argparse.Namespace) -> None:
        self.command, self.notes, self.options = command, notes, options
        self.process: subprocess.Popen[bytes] | None = None
        self.signalled, self.kept = False, ""

    def run(self) -> None:
        """Start, wait, judge, and start again."""
        adopt_orphans()
        (self.notes / SINCE).write_text(str(time.time()))
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, self._pass_on)
        failures, newest = 0, -1
        while True:
            code = self._attempt()
            directory = noted(RUN, self.notes)
            if directory and (kept := os.environ.get(KEEP_RUN)):
                Path(kept).write_text(directory)
            run = None if directory is None else RunRecord(directory)
            status = run.status() if run else RunStatus()
            if self._is_over(code, status):
                return
            reached = run.newest_step() if run else -1
            failures = 1 if reached > newest else failures + 1
            newest = max(newest, reached)
            if failures >= self.options.attempts:
                raise RunFailed(f"gave up: {failures} crashes without a newer checkpoint (last exit code {code})")
            wait = min(LONGEST_WAIT, self.options.wait * 2 ** (failures - 1))
            where = f"from step {newest}" if newest >= 0 else "from the beginning"
            logger.warning("crashed (exit code %s), attempt %d: %s again in %.0f s", code, failures, where, wait)
            self._sleep(wait)
            if self.signalled:
                return

    def _attempt(self) -> int:
        """Run the command once, to the end of the last process that it has started."""
        before = set(psutil.Process().children(recursive=True))
        environment = {LAUNCHERS_PATIENCE: str(int(self.options.grace))} | os.environ | {FOLDER: str(self.notes)}
        errors = self.notes / "stderr"  # a file, because workers outlive a killed supervisor, but not its pipe
        try:
            with errors.open("wb") as file:
                self.process = subprocess.Popen(self.command, env=environment, start_new_session=True, stderr=file)
        except OSError as error:
            fix = "Pass the whole command: python -m gpt2_repro.supervise -- python train.py RECIPE"
            raise UserError(f"Cannot start {self.command[0]} ({error.strerror}). {fix}") from None
        if self.signalled:  # before there was anything to pass it on to
            self.process.terminate()
        with errors.open("rb") as file:
            while (code := self.process.poll()) is None:
                self._forward(file)
                time.sleep(0.05)
            self._forward(file)
        # What the launcher has left belongs to this process now. No second job may start while it runs.
        if left := set(psutil.Process().children(recursive=True)) - before:
            logger.warning("waiting for %d processes that the launcher has left", len(left))
        _, alive = psutil.wait_procs(left, timeout=self.options.grace)
        for process in alive:
            process.kill()
        psutil.wait_procs(alive)
        return code

    def _is_over(self, code: int, status: RunStatus) -> bool:
        """Return whether there is nothing to restart. Raises RunFailed if the run has failed."""
        state, reason = status.state, status.reason
        if state == "diverged":
            raise RunFailed(f"not started again: {reason}")
        if state in ("complete", "stopped") or (state is None and code == 0):
            logger.info("%s: %s", state or "ended", reason or f"exit code {code}")
            return True
        if self.signalled:
            if state == "failed" and reason == "the launcher died":
                return True  # of the signal, and its workers have saved
            sys.stderr.write(self.kept)
            raise RunFailed(f"ended by a signal before it could save (exit code {code})")
        if mistake := noted(MISTAKE, self.notes):
            raise UserError(mistake)
        return False

    def _forward(self, errors: BinaryIO) -> None:
        """Print what the command has written to stderr since the last call.

        A launcher's traceback is left out after a mistake of the user. After a signal it is kept until a run has failed.
        """
        text = errors.read().decode(errors="replace")
        if self.signalled:
            self.kept += text
        elif text and noted(MISTAKE, self.notes) is None:
            sys.stderr.write(text)
            sys.stderr.flush()

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self.signalled = True
        if self.process is not None and self.process.poll() is None:
            # A launcher knows nothing of SIGUSR1, and would die of it.
            self.process.send_signal(signal.SIGTERM if number == signal.SIGUSR1 else number)

    def _sleep(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self.signalled and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, 0.2))


if __name__ == "__main__":
    cli.run(main)

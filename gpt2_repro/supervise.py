"""Restart a training command after a crash, within limits.

    python -m gpt2_repro.supervise -- accelerate launch --config_file accelerate_configs/zero1.yaml train.py
    python -m gpt2_repro.supervise --attempts 5 -- python train.py recipes/demo.yaml

The command is not restarted if the run is complete, or was stopped by a signal, --max_hours, --max_usd or
--stop_at_step. Other reasons not to restart are a wrong command line, too many updates that were not finite, and too
many crashes in a row without a newer checkpoint (--attempts sets how many). Signals are forwarded to the command. No
other part of the project restarts a run.
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

import psutil

from gpt2_repro import cli
from gpt2_repro.checkpoints.rotation import newest_step
from gpt2_repro.errors import RunFailed, UserError
from gpt2_repro.run_record import RunRecord
from gpt2_repro.run_record.notes import ENDED, FOLDER, MISTAKE, RUN, SINCE, note, noted
from gpt2_repro.run_record.status import RunStatus
from gpt2_repro.training.launch_checks import adopt_orphans


logger = logging.getLogger("gpt2_repro.supervise")

LONGEST_SAVE = 1800.0  # seconds that a leftover process may write files
LONGEST_WAIT = 300.0  # seconds between two attempts
KEEP_RUN = "GPT2_REPRO_RUN_NOTE"  # path of a file that receives the run directory
# Seconds from a signal to SIGKILL, 30 by default. A worker that hangs ends after --hang_timeout (600) by itself.
LAUNCHERS_PATIENCE = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "900"}


def main(argv: list[str]) -> None:
    """Run a training command until it has finished, and restart it after crashes."""
    parser = cli.CommandParser(prog="python -m gpt2_repro.supervise", description=__doc__)
    attempts = "Give up after N crashes in a row without a newer checkpoint."
    parser.add_argument("--attempts", type=cli.positive_count, metavar="N", default=3, help=attempts)
    wait = "Seconds until the first restart, then doubled."
    parser.add_argument("--wait", type=cli.positive_number, default=10, help=wait)
    grace = "Seconds until a leftover process that writes no files is killed. One that writes has 30 minutes."
    parser.add_argument("--grace", type=cli.positive_number, default=60, help=grace)
    parser.add_argument("command", nargs=argparse.REMAINDER, help="The training command, after --")
    args = parser.parse(argv)
    command = args.command
    if command and command[0] == "--":
        command = command[1:]
    if not command:
        raise UserError("No command given. Example: python -m gpt2_repro.supervise -- accelerate launch … train.py")
    # The run writes notes for this process here. If this process is killed, this small folder remains.
    with tempfile.TemporaryDirectory(prefix="supervise-") as notes:
        Supervisor(command, Path(notes), args).run()


class Supervisor:
    """A supervisor that runs a training command and restarts it after crashes."""

    def __init__(self, command: list[str], notes: Path, options: argparse.Namespace) -> None:
        self.command = command
        self.notes = notes
        self.options = options
        self.process: subprocess.Popen[bytes] | None = None
        self.errors = notes / "stderr"  # not a pipe, because workers must survive a killed supervisor
        self.printed = 0  # bytes of `errors`
        self.signalled = False

    def run(self) -> None:
        """Run the command, and restart it after each crash until a limit is reached."""
        adopt_orphans()
        note(SINCE, str(time.time()), self.notes)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, self._pass_on)
        failures = 0
        newest = -1
        while True:
            code = self._attempt()
            note(ENDED, str(time.time()), self.notes)
            directory = noted(RUN, self.notes)
            kept = os.environ.get(KEEP_RUN)
            if directory and kept:
                Path(kept).write_text(directory, encoding="utf-8")
            run = RunRecord(directory or self.notes)  # without a run directory, the status is empty
            if self._is_over(code, run.status()):
                return
            reached = newest_step(run.path)
            if reached > newest:
                newest = reached
                failures = 0
            failures += 1
            if failures >= self.options.attempts:
                text = f"Gave up after {failures} crashes in a row without a new checkpoint. Exit code: {code}."
                raise RunFailed(f"{text} Fix the error above, then run again.")
            wait = min(LONGEST_WAIT, self.options.wait * 2 ** (failures - 1))
            where = "from the beginning"
            if newest >= 0:
                where = f"from step {newest}"
            logger.warning("Crash %d (exit code %s). Restarting training %s in %.0f s.", failures, code, where, wait)
            self._sleep(wait)
            if self.signalled:
                return

    def _sleep(self, seconds: float) -> None:
        """Wait for some seconds, or until a signal arrives."""
        deadline = time.monotonic() + seconds
        while not self.signalled and time.monotonic() < deadline:
            time.sleep(min(seconds, 0.2))

    def _attempt(self) -> int:
        """Run the command once, until all processes that it started have ended."""
        before = set(psutil.Process().children(recursive=True))
        environment = LAUNCHERS_PATIENCE | os.environ | {FOLDER: str(self.notes)}
        self.printed = 0
        try:
            with self.errors.open("wb") as file:
                self.process = subprocess.Popen(self.command, env=environment, start_new_session=True, stderr=file)
        except OSError as error:
            fix = "Pass the complete command: python -m gpt2_repro.supervise -- python train.py RECIPE"
            raise UserError(f"Cannot start {self.command[0]} ({error.strerror}). {fix}") from None
        if self.signalled:  # the signal came before the process was started
            self.process.terminate()
        code = self.process.poll()
        while code is None:
            self._forward()
            time.sleep(0.05)
            code = self.process.poll()
        self._forward()
        # Processes that outlive the launcher are now children of this process. They must end before the next attempt.
        left = [process for process in psutil.Process().children(recursive=True) if process not in before]
        self._end_processes(left)
        return code

    def _end_processes(self, left: list[psutil.Process]) -> None:
        """Wait for processes that write files, and kill the others."""
        if left:
            logger.warning("Waiting for %d processes that are still running after the launcher ended.", len(left))
        writing = left
        deadline = time.monotonic() + LONGEST_SAVE
        while writing and time.monotonic() < deadline:  # a large checkpoint on a slow disk
            mib = {process: _written_mib(process) for process in left}
            _, left = psutil.wait_procs(left, timeout=min(self.options.grace, LONGEST_SAVE))
            writing = [process for process in left if _written_mib(process) > mib[process]]
        for process in left:
            process.kill()
        psutil.wait_procs(left)

    def _is_over(self, code: int, status: RunStatus) -> bool:
        """Return whether the run is over. If false, the command must be restarted.

        Raises RunFailed if the run diverged, or a signal ended it before a checkpoint was saved. Raises the UserError
        that the command reported.
        """
        state = status.state
        reason = status.reason
        if state == "diverged":
            raise RunFailed(f"The run is not restarted: {reason}")
        # A run fails after its end if its last copy failed. After a signal, the launcher fails although all is well.
        by_signal = self.signalled or (reason is not None and reason.startswith("SIG"))
        has_ended = state in ("complete", "stopped") and (code == 0 or by_signal)
        has_no_run = state is None and code == 0  # such as --help
        if has_ended or has_no_run:
            logger.info("%s: %s", state or "ended", reason or f"exit code {code}")
            return True
        if self.signalled:
            if state == "failed" and reason == "the launcher died":
                return True  # the signal ended it, and its workers have saved
            self._forward(everything=True)
            text = f"The run was ended by a signal before it saved a checkpoint (exit code {code})."
            raise RunFailed(f"{text} Run the same command again.")
        mistake = noted(MISTAKE, self.notes)
        if mistake:
            raise UserError(mistake)
        return False

    def _forward(self, *, everything: bool = False) -> None:
        """Print the text that the command wrote to stderr since the last call."""
        # After a signal, or a mistake of the user, the text is only the launcher's traceback.
        if not everything and (self.signalled or noted(MISTAKE, self.notes)):
            return
        with self.errors.open("rb") as file:
            file.seek(self.printed)
            text = file.read()
        self.printed += len(text)
        sys.stderr.write(text.decode(errors="replace"))
        sys.stderr.flush()

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self.signalled = True
        if self.process is not None and self.process.poll() is None:
            # A launcher does not handle SIGUSR1 and SIGUSR2, and would be killed by them.
            if number in (signal.SIGUSR1, signal.SIGUSR2):
                number = signal.SIGTERM
            self.process.send_signal(number)


def _written_mib(process: psutil.Process) -> int:
    """Return how many MiB a process has written since its start, or 0 if it has ended."""
    try:
        return process.io_counters().write_chars >> 20
    except psutil.Error:
        return 0


if __name__ == "__main__":
    cli.run(main, prints_results=False)

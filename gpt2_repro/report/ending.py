"""Describe how far a run is, and why it ended."""

import datetime
import re
import statistics

import psutil

from gpt2_repro.checkpoints.rotation import newest_checkpoint
from gpt2_repro.report.read import Run, values
from gpt2_repro.run_record.layout import CONSOLE
from gpt2_repro.text import count, duration, in_terminal


LINE_CHARACTERS = 200  # of the last line that a run printed
AGAIN = "Run the same command again."
# The beginnings of the messages of Python, of torch on GPUs, and of torch on CPUs.
OUT_OF_MEMORY = re.compile(r"MemoryError|OutOfMemoryError|CUDA out of memory|DefaultCPUAllocator: can't allocate")
TIMEOUT = re.compile(r"^Timeout \((.+)\)!$", re.MULTILINE)  # of the watchdog of a run
START = "=== "  # beginning of the first line of each attempt in console.log
LIMITS = ("--max_hours", "--max_usd")
SIGNALS = {
    "SIGINT": "by Ctrl-C (SIGINT)",
    "SIGTERM": "by SIGTERM, from a user, a scheduler or a machine that was taken back",
    "SIGHUP": "by SIGHUP, because its terminal was closed",
}


def progress(run: Run) -> str:
    """Return a run's progress, such as `step 200 of 300, 1.6 M tokens, 45 s left`."""
    status = run.status
    if status.step is None:
        return "no step logged"
    text = f"step {status.step:,}"
    if status.max_steps:
        text += f" of {status.max_steps:,}"
    text += f", {count(status.tokens)} tokens"
    seconds = _seconds_left(run)
    if seconds is not None:
        text += f", {duration(seconds)} left"
    return text


def _seconds_left(run: Run) -> float | None:
    """Return the seconds until a running run has trained all steps, or None if unknown."""
    total = (run.status.max_steps or 0) * run.environment.plan.tokens_per_step
    speed = median(run, "tokens_per_second")
    if not run.is_live or run.status.tokens is None or speed is None or not total:
        return None
    return max(0, total - run.status.tokens) / max(1, speed)


def median(run: Run, key: str) -> float | None:
    """Return the median of the logged values of `key`, or None without values."""
    logged = values(run.training, key)
    return statistics.median(logged) if logged else None


def ending(run: Run) -> str:
    """Return why a run has ended or does not continue, and what to do. "" for a healthy run."""
    state = run.status.state
    if state == "killed":
        return f"Dead since {_clock(run)}: {_cause_of_death(run)}. {_again(run)}"
    if run.is_silent:
        return _silence(run)
    if state == "stopped":
        return _stop(run)
    if state == "diverged":
        reason = run.status.reason or "the loss is not finite"
        return f"Diverged: {_clause(reason)}. Lower --learning_rate and pass another --output_dir."
    if state == "failed":
        return _failure(run)
    return ""


def _again(run: Run) -> str:
    """Return what to do, and whether the run begins again at step 0."""
    if run.status.step and newest_checkpoint(run.path) is None:
        return f"{AGAIN} It begins at step 0, because this folder has no complete checkpoint."
    return AGAIN


def _cause_of_death(run: Run) -> str:
    """Return why a process of this machine has ended without an entry in run_status.json."""
    timeout = TIMEOUT.search(_last_attempt(run))
    if timeout:
        return f"it made no progress for {timeout[1]} hours, so its watchdog ended it (stack traces in {CONSOLE})"
    updated = _updated(run)
    if updated is not None and psutil.boot_time() > updated.timestamp():
        return "the machine was restarted"
    return "killed without a record, as by SIGKILL (out of memory?)"


def _silence(run: Run) -> str:
    silent = duration(run.status.age())
    if run.process == "alive":
        return f"Hangs since {_clock(run)}: {run.holder} lives, but has recorded nothing for {silent}. End it. {_again(run)}"
    where = run.holder or "its process"
    return f"No sign of life since {_clock(run)} from {where}: the machine is gone, or the run hangs or was killed. {_again(run)}"


def _stop(run: Run) -> str:
    reason = run.status.reason or "by an unknown request"
    at = f"at step {run.status.step:,}" if run.status.step is not None else "before the first step"
    if reason.startswith("--stop_at_step"):
        return f"Stopped {at}, as requested by {reason}. Pass a later step, or no --stop_at_step, to continue."
    if reason.startswith(LIMITS):
        return f"Stopped {at}, the limit {reason}. Raise the limit to continue."
    if reason.startswith("SIG"):
        reason = SIGNALS.get(reason, f"by {reason}")
    return f"Stopped {at} {reason}. {_again(run)}"


def _failure(run: Run) -> str:
    reason = run.status.reason or "no reason was recorded"
    if OUT_OF_MEMORY.search(reason):
        memory = "memory"
        if "OutOfMemoryError" in reason or "CUDA" in reason:
            memory = "GPU memory"
        advice = "Lower --per_device_train_batch_size."
        return f"Out of {memory} since {_clock(run)}: {_clause(reason)}. {advice} {_again(run)}"
    return f"Failed at {_clock(run)}: {_clause(reason)}. {_again(run)}"


def _clause(text: str) -> str:
    return in_terminal(text, LINE_CHARACTERS).rstrip(".")


def _updated(run: Run) -> datetime.datetime | None:
    try:
        return datetime.datetime.fromisoformat(run.status.updated or "")
    except ValueError:
        return None


def _clock(run: Run) -> str:
    """Return the local time of the last status update, with the date if it was not today."""
    updated = _updated(run)
    if updated is None:
        return "an unknown time"
    local = updated.astimezone()
    if local.date() == datetime.datetime.now().astimezone().date():
        return f"{local:%H:%M}"
    return f"{local:%Y-%m-%d %H:%M}"


def _last_attempt(run: Run) -> str:
    """Return what the last attempt of a run has printed."""
    try:
        text = (run.path / CONSOLE).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return text.rpartition(f"\n{START}")[2]


def last_line(run: Run) -> str:
    """Return the last line that the run printed, "" if there is none."""
    for line in reversed(_last_attempt(run).split("\n")):
        if line.strip():
            return in_terminal(line.strip(), LINE_CHARACTERS)
    return ""

"""Train a few steps in a new process to see whether the memory is large enough."""

import logging
import re
from collections.abc import Sequence

from gpt2_repro.planning.memory import MemoryTrial
from gpt2_repro.preflight.environment import error_in, run_command
from gpt2_repro.text import Finding


logger = logging.getLogger(__name__)
OUT_OF_MEMORY = re.compile(r"out of memory|ALLOC_FAILED|(allocate|enough) memory|MemoryError|SIGKILL", re.IGNORECASE)
TRIAL_SECONDS = 600.0  # timeout of a training of two steps


def try_training(command: Sequence[str], trial: MemoryTrial) -> Finding | None:
    """Return the result of a training command with the setting `trial`, or None if the memory is too small."""
    # A new process for each memory setting, because a process frees all its memory when it ends (llm.c, discussion 481).
    code, output = run_command([*command, *trial.options.split()], TRIAL_SECONDS)
    # Exit codes -9 and 137: the kernel killed the process because the machine ran out of memory.
    is_full = code in (-9, 137) or (code != 0 and OUT_OF_MEMORY.search(output) is not None)
    logger.info("  %s: %s", trial.options, "out of memory" if is_full else "failed" if code else "fits")
    if is_full:
        return None
    words = f"{trial.options} failed: {error_in(output)}" if code else f"fits: {trial.options}"
    return Finding("✗" if code else "✓", "memory", words)

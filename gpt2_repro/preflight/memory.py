"""The largest micro-batch that fits, found with the real command in a fresh process, along the field's ladder (llm.c, discussion 481).

Tokens per step stay as they are: accumulation makes up for it.
"""

import dataclasses
import itertools
import re
import subprocess
from collections.abc import Callable, Sequence
from typing import Literal


OUT_OF_MEMORY = (
    *("OutOfMemoryError", "CUDA out of memory", "can't allocate memory", "not enough memory", "MemoryError"),
    "Signal 9 (SIGKILL)",  # what a launcher says of a process that the kernel has killed
)


@dataclasses.dataclass(frozen=True)
class Rung:
    """A setting of the ladder: rows of a pass on one device, and whether only each block's input is kept."""

    micro_batch: int
    checkpointing: bool = False

    @property
    def options(self) -> list[str]:
        """What is typed for it."""
        words = ["--per_device_train_batch_size", str(self.micro_batch)]
        return [*words, "--activation_checkpointing"] if self.checkpointing else words


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a rung went. `said`: the last line of an attempt that failed for another reason than memory."""

    rung: Rung
    result: Literal["fits", "out of memory", "failed"]
    said: str = ""


def find_largest(
    start: int, most: int, divides: Callable[[int], bool], attempt: Callable[[Rung], Outcome]
) -> list[Outcome]:
    """Attempt rungs until it is known what fits, or one fails for another reason than memory.

    From `start` up by doubling, to `most` at the most; or down: with activation checkpointing, half of it, and so on. Once one fits
    with checkpointing the search goes on without, because checkpointing costs a third of the speed.

    Args:
        divides: whether so many rows of a pass divide the tokens of a step; others are not attempted.
    """
    outcomes: list[Outcome] = []

    def fits(rung: Rung) -> bool:
        if outcomes and outcomes[-1].result == "failed":
            return False
        outcomes.append(attempt(rung))
        return outcomes[-1].result == "fits"

    sizes = [start >> halvings for halvings in range(start.bit_length()) if divides(start >> halvings)]
    rows = sizes[0]
    if fits(Rung(rows)):
        while 2 * rows <= most and divides(2 * rows) and fits(Rung(2 * rows)):
            rows *= 2
        return outcomes
    checkpointed = False
    for rows, half in itertools.zip_longest(sizes, sizes[1:]):
        checkpointed = checkpointed or fits(Rung(rows, checkpointing=True))
        if half and fits(Rung(half)):
            break
    return outcomes


def best(outcomes: Sequence[Outcome]) -> Rung | None:
    """The largest that fits without checkpointing, else the largest with it; None where none fits."""
    fitting = [outcome.rung for outcome in outcomes if outcome.result == "fits"]
    return max(fitting, key=lambda rung: (not rung.checkpointing, rung.micro_batch), default=None)


def attempt_command(command: Sequence[str], rung: Rung, *, seconds: float) -> Outcome:
    """Run the command with the options of a rung to its end, in a fresh process: what it took is then given back."""
    try:
        done = subprocess.run([*command, *rung.options], capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return Outcome(rung, "failed", f"not done in {seconds:.0f} s")
    if done.returncode == 0:
        return Outcome(rung, "fits")
    text = done.stdout + done.stderr
    # The kernel kills what takes all of the machine's memory.
    if done.returncode in (-9, 137) or any(sign in text for sign in OUT_OF_MEMORY):
        return Outcome(rung, "out of memory")
    lines = [line.strip() for line in text.splitlines() if re.search(r"\w", line)] or [f"exit code {done.returncode}"]
    # A launcher writes a traceback of its own behind the line that says what was wrong.
    telling = [line for line in lines if re.match(r"error: |[\w.]*(Error|Exception)\b", line)]
    return Outcome(rung, "failed", (telling or lines[-1:])[0])

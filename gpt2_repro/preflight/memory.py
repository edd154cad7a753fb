"""The largest micro-batch that fits, found with the real command in a fresh process, down the field's ladder.

As it is; with activation checkpointing; half of it without; and so on (llm.c, discussion 481). Tokens per step stay as they are:
accumulation makes up for it.
"""

import dataclasses
import subprocess
from collections.abc import Callable, Iterator, Sequence
from typing import Literal


OUT_OF_MEMORY = ("OutOfMemoryError", "CUDA out of memory", "can't allocate memory", "not enough memory", "MemoryError")


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


def ladder(micro_batch: int, divides: Callable[[int], bool]) -> Iterator[Rung]:
    """From a micro-batch down to one row; only those of which `divides` says that they divide the tokens of a step."""
    while micro_batch:
        if divides(micro_batch):
            yield Rung(micro_batch)
            yield Rung(micro_batch, checkpointing=True)
        micro_batch //= 2


def largest_that_fits(rungs: Iterator[Rung], attempt: Callable[[Rung], Outcome]) -> list[Outcome]:
    """Attempt the rungs until one fits, or one fails for another reason than memory."""
    outcomes = []
    for rung in rungs:
        outcomes.append(attempt(rung))
        if outcomes[-1].result != "out of memory":
            break
    return outcomes


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
    return Outcome(rung, "failed", (text.strip().splitlines() or [f"exit code {done.returncode}"])[-1])

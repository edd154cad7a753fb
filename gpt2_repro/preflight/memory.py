"""The largest micro-batch that fits, found with the real command in a fresh process, along the field's ladder (llm.c, discussion 481).

Tokens per step stay as they are: accumulation makes up for it.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Literal

from gpt2_repro.preflight.processes import last_words, run_to_end


OUT_OF_MEMORY = (
    *("OutOfMemoryError", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED"),
    *("can't allocate memory", "not enough memory", "MemoryError"),
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


def find_largest(start: int, most: int, rows: int, attempt: Callable[[Rung], Outcome]) -> list[Outcome]:
    """Attempt rungs until it is known what fits, or one fails for another reason than memory.

    From `start` up to `most`; or down: with activation checkpointing, about half of it, and so on. Once one fits with checkpointing
    the search goes on without, because checkpointing costs a third of the speed.

    Args:
        rows: of a device and step; only what divides them is attempted.
    """
    outcomes: list[Outcome] = []

    def fits(rung: Rung) -> bool:
        if outcomes and outcomes[-1].result == "failed":
            return False
        outcomes.append(attempt(rung))
        return outcomes[-1].result == "fits"

    sizes = [size for size in range(1, most + 1) if rows % size == 0]
    below = [size for size in reversed(sizes) if size <= start]
    if fits(Rung(below[0])):
        for size in _doubled(sizes, below[0]):
            if not fits(Rung(size)):
                break
        return outcomes
    checkpointed = False
    down = _halved(below)
    for size, half in itertools.zip_longest(down, down[1:]):
        checkpointed = checkpointed or fits(Rung(size, checkpointing=True))
        if half and fits(Rung(half)):
            break
    return outcomes


def _doubled(sizes: Sequence[int], size: int) -> list[int]:
    """About twice as much each time, and the largest of all at the end."""
    up: list[int] = []
    while larger := [other for other in sizes if other >= 2 * size]:
        size = larger[0]
        up.append(size)
    return [*up, sizes[-1]] if sizes[-1] > size else up


def _halved(sizes: Sequence[int]) -> list[int]:
    """The first, and about half as much each time, down to one."""
    down = [sizes[0]]
    while smaller := [other for other in sizes if 2 * other <= down[-1]]:
        down.append(smaller[0])
    return down


def best(outcomes: Sequence[Outcome]) -> Rung | None:
    """The largest that fits without checkpointing, else the largest with it; None where none fits."""
    fitting = [outcome.rung for outcome in outcomes if outcome.result == "fits"]
    return max(fitting, key=lambda rung: (not rung.checkpointing, rung.micro_batch), default=None)


def attempt_command(command: Sequence[str], rung: Rung, *, seconds: float) -> Outcome:
    """Run the command with the options of a rung to its end, in a fresh process: what it took is then given back."""
    code, said = run_to_end([*command, *rung.options], too_long=lambda _, elapsed: elapsed > seconds)
    if code is None:
        return Outcome(rung, "failed", f"not done in {seconds:.0f} s")
    if code == 0:
        return Outcome(rung, "fits")
    # The kernel kills what takes all of the machine's memory.
    if code in (-9, 137) or any(sign in said for sign in OUT_OF_MEMORY):
        return Outcome(rung, "out of memory")
    return Outcome(rung, "failed", last_words(said))

"""Find the largest micro-batch that fits, with the real command in fresh processes (llm.c, discussion 481).

The tokens per step do not change: accumulation is derived.
"""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from gpt2_repro.preflight.processes import last_words, run_to_end


OUT_OF_MEMORY = (
    *("OutOfMemoryError", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED"),
    *("can't allocate memory", "not enough memory", "MemoryError"),
    "Signal 9 (SIGKILL)",  # a launcher's message if the kernel killed a process
)


class MemoryTrial(NamedTuple):
    """A setting to attempt: the micro-batch, and whether activation checkpointing is on."""

    micro_batch: int
    checkpointing: bool = False

    @property
    def options(self) -> list[str]:
        """The command-line options of the setting."""
        words = ["--per_device_train_batch_size", str(self.micro_batch)]
        return [*words, "--activation_checkpointing"] if self.checkpointing else words


class Outcome(NamedTuple):
    """The result of an attempt. `said`: the error if it failed for another reason than memory."""

    trial: MemoryTrial
    result: Literal["fits", "out of memory", "failed"]
    said: str = ""


def find_largest(start: int, most: int, rows: int, attempt: Callable[[MemoryTrial], Outcome]) -> list[Outcome]:
    """Attempt rungs until the largest that fits is known, or one fails for another reason than memory.

    From `start` up to `most` by doubling, or down by halving. If none fits, down from `start` with activation checkpointing,
    which costs a third of the speed.

    Args:
        rows: of a device and step; a micro-batch divides them.
    """
    ladder = [next(size for size in range(most, 0, -1) if rows % size == 0)]
    while ladder[-1] > 1:
        ladder.append(next(size for size in range(ladder[-1] // 2, 0, -1) if rows % size == 0))
    down = [size for size in ladder if size <= start]
    first = attempt(MemoryTrial(down[0]))
    following: list[MemoryTrial] = []
    if first.result == "fits":
        following = [MemoryTrial(size) for size in reversed(ladder) if size > down[0]]
    elif first.result == "out of memory":
        following = [MemoryTrial(size) for size in down[1:]] + [MemoryTrial(size, checkpointing=True) for size in down]
    outcomes = [first]
    for trial in following:
        if outcomes[-1].result == first.result:
            outcomes.append(attempt(trial))
    return outcomes


def best(outcomes: Sequence[Outcome]) -> MemoryTrial | None:
    """Return the last trial that fits; None if none fits."""
    return next((outcome.trial for outcome in reversed(outcomes) if outcome.result == "fits"), None)


def attempt_command(command: Sequence[str], trial: MemoryTrial, *, seconds: float) -> Outcome:
    """Run the command with the options of a trial in a fresh process, which frees all memory at its end."""
    code, said = run_to_end([*command, *trial.options], seconds=seconds)
    if code is None:
        return Outcome(trial, "failed", f"not done in {seconds:.0f} s")
    if code == 0:
        return Outcome(trial, "fits")
    # The kernel kills a process that takes all memory of the machine.
    if code in (-9, 137) or any(sign in said for sign in OUT_OF_MEMORY):
        return Outcome(trial, "out of memory")
    return Outcome(trial, "failed", last_words(said))

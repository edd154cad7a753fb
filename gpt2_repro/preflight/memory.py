"""Estimate the memory of a training pass, and find the largest micro-batch that fits.

It is found with the real command in fresh processes (llm.c, discussion 481). The tokens per step do not change:
accumulation is derived.
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


# Bytes saved for the backward pass, per token, block and unit of width: eager, under bf16 autocast, with the shapes of the
# recipes (benchmarks/saved_bytes.py, with two and four blocks). Compiled code saves up to a tenth less.
SAVED_BYTES = {"gpt2": 36, "llama": 56, "mixtral": 92}
CONTEXT_BYTES = 1.5e9  # CUDA context and buffers of collectives
USABLE = 0.95  # share of a GPU's memory; the allocator loses the rest to fragmentation


class MemoryEstimate(NamedTuple):
    """The memory of one GPU in a training step. With document masks, dropout or eager attention it is more.

    Args:
        saved: see SAVED_BYTES; twice that in fp32.
        ranks: over which the optimizer is divided.
        chunk: tokens whose logits are held at a time.
    """

    parameters: int
    ranks: int
    n_layer: int
    n_embd: int
    sequence_length: int
    vocab_size: int
    chunk: int
    saved: int

    def bytes_of(self, trial: MemoryTrial) -> float:
        """Return the bytes that a micro-batch takes."""
        tokens = trial.micro_batch * self.sequence_length
        # A weight and its gradient in bf16 and the gradient's fp32 sum, or both in fp32; then master, m and v.
        states = self.parameters * (8 + 12 / self.ranks)
        # With checkpointing: an fp32 input per block, and one block that is computed again. 8 for embedding and head.
        blocks = self.saved + 4 * self.n_layer if trial.checkpointing else self.saved * self.n_layer
        activations = tokens * self.n_embd * (blocks + 8)
        # Two chunks of logits meet: the old one in fp32 and its bf16 gradient, the new one in bf16 and fp32.
        logits = 12 * min(tokens, self.chunk) * self.vocab_size
        return states + activations + logits + CONTEXT_BYTES

    def fits(self, trial: MemoryTrial, memory_bytes: float) -> bool:
        """Whether a micro-batch fits in the memory of a GPU."""
        return self.bytes_of(trial) <= USABLE * memory_bytes

    def largest(self, most: MemoryTrial, rows: int, memory_bytes: float) -> MemoryTrial | None:
        """Return the largest trial that fits, up to `most`; with activation checkpointing only if none fits without.

        Args:
            rows: of a device and step; a micro-batch divides them.
        """
        sizes = [size for size in range(min(most.micro_batch, rows), 0, -1) if rows % size == 0]
        trials = [MemoryTrial(size, on) for on in sorted({most.checkpointing, True}) for size in sizes]
        return next((trial for trial in trials if self.fits(trial, memory_bytes)), None)


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

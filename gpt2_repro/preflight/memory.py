"""Estimate GPU memory for training, and find the largest micro-batch that fits."""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from gpt2_repro.preflight.processes import last_words, run_to_end


OUT_OF_MEMORY = (
    *("OutOfMemoryError", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED"),
    *("can't allocate memory", "not enough memory", "MemoryError"),
    "Signal 9 (SIGKILL)",  # message of a launcher after the kernel killed a process
)


class MemoryTrial(NamedTuple):
    """A memory setting to try: micro-batch, with or without activation checkpointing."""

    micro_batch: int
    checkpointing: bool = False

    @property
    def options(self) -> list[str]:
        """The command-line options of this memory setting."""
        words = ["--per_device_train_batch_size", str(self.micro_batch)]
        return [*words, "--activation_checkpointing"] if self.checkpointing else words


# Bytes saved for the backward pass, per token, block and unit of width, with the shapes of the recipes. The compiled
# loss is traced on CUDA (tests/model/test_cuda_trace.py), with bf16 weights and with fp32 weights under autocast.
# Eager mode under autocast is measured with benchmarks/saved_bytes.py. fp32 saves twice as many bytes.
SAVED_BYTES = {
    "gpt2": {"bf16": 34.1, "autocast": 38.1, "eager": 36},
    "llama": {"bf16": 34.1, "autocast": 37.1, "eager": 56},
    "mixtral": {"bf16": 42.2, "autocast": 69.2, "eager": 92},
}
CONTEXT_BYTES = 1.5e9  # CUDA context and communication buffers
USABLE = 0.95  # share of a GPU's memory that can be used; the rest is lost to fragmentation in the allocator


class MemoryEstimate(NamedTuple):
    """An estimate of the memory that one GPU needs in a training step.

    Document masks, dropout and eager attention need more memory than estimated.

    Args:
        ranks: number of processes.
        sharded: whether the optimizer state is divided among the processes (ZeRO-1). If false (DDP or one
            process), the weights are fp32, and autocast computes in bf16.
        chunk: number of tokens whose logits are in memory at the same time.
        state_bytes: bytes per parameter for the fp32 master weights and the optimizer state.
    """

    model_type: str
    parameters: int
    ranks: int
    n_layer: int
    n_embd: int
    sequence_length: int
    vocab_size: int
    chunk: int
    bf16: bool = True
    compiled: bool = True
    sharded: bool = True
    state_bytes: int = 12

    def bytes_of(self, trial: MemoryTrial) -> float:
        """Return the GPU memory in bytes of a training step with the setting `trial`."""
        tokens, autocast = trial.micro_batch * self.sequence_length, self.bf16 and not self.sharded
        # ZeRO-1: weight and gradient in bf16 and the fp32 gradient sum; divided over the ranks, the fp32 master weight
        # and the two Adam moments. DDP: weight, gradient and moments in fp32, the weight in bf16, the buckets of DDP.
        of_weight = 8 + self.state_bytes / self.ranks if self.sharded else 6 + self.state_bytes + 4 * (self.ranks > 1)
        saved = SAVED_BYTES[self.model_type]["eager" if not self.compiled else "autocast" if autocast else "bf16"]
        inputs = 4 if autocast else 2  # of a block, which is all that is saved with activation checkpointing
        blocks = saved + inputs * self.n_layer if trial.checkpointing else saved * self.n_layer
        # 2: the gradient of the head's input.
        activations = tokens * self.n_embd * (blocks + inputs + 2) * (1 if self.bf16 else 2)
        # The logits of a chunk and their gradient, in bf16. Eager mode also has the logits in fp32, and keeps the fp32
        # probabilities and the gradient of the last chunk.
        logits = min(tokens, self.chunk) * self.vocab_size * (12 if not self.compiled else 4 if self.bf16 else 8)
        return self.parameters * of_weight + activations + logits + CONTEXT_BYTES

    def fits(self, trial: MemoryTrial, memory_bytes: float) -> bool:
        """Return whether the memory setting `trial` fits in `memory_bytes` of GPU memory."""
        return self.bytes_of(trial) <= USABLE * memory_bytes

    def largest(self, most: MemoryTrial, rows: int, memory_bytes: float) -> MemoryTrial | None:
        """Return the memory setting with the largest micro-batch that fits, or None.

        Activation checkpointing is added only if no micro-batch fits without it.

        Args:
            most: the largest micro-batch to consider, and whether activation checkpointing is required.
            rows: number of rows per process and optimizer step. Only micro-batches that divide it are considered.
        """
        sizes = [size for size in range(min(most.micro_batch, rows), 0, -1) if rows % size == 0]
        trials = [MemoryTrial(size, on) for on in sorted({most.checkpointing, True}) for size in sizes]
        return next((trial for trial in trials if self.fits(trial, memory_bytes)), None)


class Outcome(NamedTuple):
    """The result of an attempt to train with a memory setting.

    Args:
        said: the error message if `result` is "failed".
    """

    trial: MemoryTrial
    result: Literal["fits", "out of memory", "failed"]
    said: str = ""


def find_largest(start: int, most: int, rows: int, attempt: Callable[[MemoryTrial], Outcome]) -> list[Outcome]:
    """Search for the largest micro-batch that fits in memory. Return all outcomes.

    The search roughly doubles or halves the micro-batch. Activation checkpointing is tried only if not even one row fits.

    Args:
        start: micro-batch of the first attempt.
        most: largest micro-batch to try.
        rows: number of rows per process and optimizer step. Only micro-batches that divide this number are tried.
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
        # Activation checkpointing comes last, because it reduces the speed by a third.
        following = [MemoryTrial(size) for size in down[1:]] + [MemoryTrial(size, checkpointing=True) for size in down]
    outcomes = [first]
    for trial in following:
        if outcomes[-1].result == first.result:
            outcomes.append(attempt(trial))
    return outcomes


def best(outcomes: Sequence[Outcome]) -> MemoryTrial | None:
    """Return the memory setting with the largest micro-batch that fits, or None."""
    # In the order of find_largest, the last setting that fits is the largest.
    return next((outcome.trial for outcome in reversed(outcomes) if outcome.result == "fits"), None)


def attempt_command(command: Sequence[str], trial: MemoryTrial, *, seconds: float) -> Outcome:
    """Run a training command with the memory setting `trial`. Return the outcome.

    The options of `trial` are appended to `command`. The outcome is "failed" if the command takes longer than
    `seconds`.
    """
    # A new process for each memory setting, because a process frees all its memory when it ends (llm.c, discussion 481).
    code, said = run_to_end([*command, *trial.options], seconds=seconds)
    if code is None:
        return Outcome(trial, "failed", f"not finished after {seconds:.0f} s")
    if code == 0:
        return Outcome(trial, "fits")
    # Exit codes -9 and 137: the kernel killed the process because the machine ran out of memory.
    if code in (-9, 137) or any(sign in said for sign in OUT_OF_MEMORY):
        return Outcome(trial, "out of memory")
    return Outcome(trial, "failed", last_words(said))

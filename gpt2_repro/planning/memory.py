"""Estimate GPU memory for training, and list the micro-batches to try."""

from typing import NamedTuple

from gpt2_repro.batch_plan import micro_batches
from gpt2_repro.files import read_table
from gpt2_repro.text import Finding, size


class MemoryTrial(NamedTuple):
    """A memory setting to try: micro-batch, with or without activation checkpointing."""

    micro_batch: int
    checkpointing: bool = False

    @property
    def options(self) -> str:
        """The command-line options of this memory setting."""
        return f"--per_device_train_batch_size {self.micro_batch}{' --activation_checkpointing' * self.checkpointing}"


SAVED_BYTES: dict[str, dict[str, float]] = read_table(__file__, "saved_bytes.yaml")
# CUDA context, workspaces of libraries, communication buffers, and what the allocator holds without using it. With it,
# the estimate of GPT-2 124M with 64 rows is what an H200 needed: 27.5 GB (benchmarks/RESULTS.md).
CONTEXT_BYTES = 2.6e9
USABLE = 0.95  # share of a GPU's memory that can be used; the rest is lost to fragmentation in the allocator


class MemoryEstimate(NamedTuple):
    """An estimate of the memory that one GPU needs in a training step.

    Document masks, dropout and eager attention need more memory than estimated.
    """

    model_type: str
    parameters: int
    ranks: int  # processes
    n_layer: int
    n_embd: int
    sequence_length: int
    vocab_size: int
    chunk: int  # tokens whose logits are in memory at the same time
    bf16: bool = True
    compiled: bool = True
    # Whether the optimizer state is divided among the processes (ZeRO-1). If not (DDP or one process), the weights are
    # fp32, and autocast computes in bf16.
    sharded: bool = True
    state_bytes: int = 12  # per parameter, for the fp32 master weights and the optimizer state

    def bytes_of(self, trial: MemoryTrial) -> float:
        """Return the GPU memory in bytes of a training step with the setting `trial`."""
        tokens, autocast = trial.micro_batch * self.sequence_length, self.bf16 and not self.sharded
        # ZeRO-1: weight and gradient in bf16 and the fp32 gradient sum; divided over the ranks, the fp32 master weight
        # and the two Adam moments. DDP: weight, gradient and moments in fp32, the weight in bf16, the buckets of DDP.
        of_weight = 8 + self.state_bytes / self.ranks if self.sharded else 6 + self.state_bytes + 4 * (self.ranks > 1)
        mode = "eager" if not self.compiled else "autocast" if autocast else "bf16"
        saved = SAVED_BYTES.get(self.model_type, SAVED_BYTES["llama"])[mode]
        inputs = 4 if autocast else 2  # of a block, which is all that is saved with activation checkpointing
        blocks = saved + inputs * self.n_layer if trial.checkpointing else saved * self.n_layer
        # 2: the gradient of the head's input.
        activations = tokens * self.n_embd * (blocks + inputs + 2) * (1 if self.bf16 else 2)
        # On GPUs the gradient of a chunk replaces its logits (softmax_kernel.py). A CPU is not compiled.
        logits = min(tokens, self.chunk) * self.vocab_size * (6 if not self.compiled else 2 if self.bf16 else 4)
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
        return next((trial for trial in trials_of(most, rows) if self.fits(trial, memory_bytes)), None)


def check_memory(
    estimate: MemoryEstimate, requested: MemoryTrial, rows: int, memory_bytes: float
) -> tuple[Finding, MemoryTrial | None]:
    """Check whether a micro-batch fits on a GPU. Return the finding, and the memory setting to use, if any fits."""
    form = f"{requested.micro_batch} rows x {estimate.sequence_length} tokens{', checkpointed,' * requested.checkpointing}"
    usable = f"{size(USABLE * memory_bytes)} of the GPU's {size(memory_bytes)}"
    text = f"{form} need {size(estimate.bytes_of(requested))} (estimated). Usable: {usable}"
    if estimate.fits(requested, memory_bytes):
        return Finding("✓", "memory", text), requested
    best = estimate.largest(requested, rows, memory_bytes)
    fix = f"Pass {best.options}" if best else "Not even one row fits. Use a larger GPU"
    return Finding("✗", "memory", f"{text}. {fix}"), best


def trials_of(most: MemoryTrial, rows: int) -> list[MemoryTrial]:
    """Return the memory settings to try, the fastest first.

    Args:
        most: the largest micro-batch, and whether activation checkpointing is required. If it is not, settings with
            checkpointing come last, because they are slower.
        rows: number of rows per process and optimizer step. The micro-batches divide it, and each one is about half
            as large as the one before.
    """
    sizes, limit = [], most.micro_batch
    while limit:
        sizes.append(micro_batches(rows, limit)[0])
        limit = sizes[-1] // 2
    return [MemoryTrial(size, on) for on in sorted({most.checkpointing, True}) for size in sizes]

"""Estimate GPU memory for training, and list the micro-batches to try."""

from typing import NamedTuple

from gpt2_repro.planning.batch_plan import micro_batches
from gpt2_repro.text import Finding, size


class MemoryTrial(NamedTuple):
    """A memory setting to try: micro-batch, with or without activation checkpointing."""

    micro_batch: int
    checkpointing: bool = False

    @property
    def options(self) -> str:
        """The command-line options of this memory setting."""
        options = f"--per_device_train_batch_size {self.micro_batch}"
        if self.checkpointing:
            options += " --activation_checkpointing"
        return options


class SavedBytes(NamedTuple):
    """Bytes saved for the backward pass, per token, block and unit of width."""

    bf16: float  # compiled, with bf16 weights
    autocast: float  # compiled, with fp32 weights and products in bf16
    eager: float  # under autocast


# With the shapes of the recipes. The compiled loss is traced with the attention operation of CUDA
# (tests/model/test_saved_bytes.py), and eager mode is measured with benchmarks/saved_bytes.py. fp32 saves twice as much.
SAVED_BYTES = {
    "gpt2": SavedBytes(bf16=34.1, autocast=38.1, eager=36),
    "llama": SavedBytes(bf16=34.1, autocast=37.1, eager=56),
    "mixtral": SavedBytes(bf16=42.2, autocast=69.2, eager=92),
}
OTHER_ARCHITECTURES = SAVED_BYTES["llama"]
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
        of_weights = self.parameters * self._bytes_per_weight()
        return of_weights + self._activation_bytes(trial) + self._logit_bytes(trial) + CONTEXT_BYTES

    @property
    def _is_autocast(self) -> bool:
        return self.bf16 and not self.sharded

    def _bytes_per_weight(self) -> float:
        if self.sharded:
            # Weight and gradient in bf16 and the fp32 gradient sum. The ranks share the fp32 master weight and the two
            # moments of Adam.
            return 8 + self.state_bytes / self.ranks
        # Weight, gradient and moments in fp32, and the weight in bf16.
        copied = 6 + self.state_bytes
        buckets_of_ddp = 4 if self.ranks > 1 else 0
        return copied + buckets_of_ddp

    def _activation_bytes(self, trial: MemoryTrial) -> float:
        saved = SAVED_BYTES.get(self.model_type, OTHER_ARCHITECTURES)
        if not self.compiled:
            of_block = saved.eager
        elif self._is_autocast:
            of_block = saved.autocast
        else:
            of_block = saved.bf16
        inputs = 4 if self._is_autocast else 2  # of a block
        if trial.checkpointing:
            blocks = inputs * self.n_layer + of_block  # one block at a time is computed again
        else:
            blocks = of_block * self.n_layer
        gradient_of_head_input = 2
        tokens = trial.micro_batch * self.sequence_length
        activations = tokens * self.n_embd * (blocks + inputs + gradient_of_head_input)
        return activations if self.bf16 else 2 * activations

    def _logit_bytes(self, trial: MemoryTrial) -> float:
        # On GPUs the gradient of a chunk replaces its logits (softmax_kernel.py). A CPU is not compiled.
        if not self.compiled:
            bytes_per_logit = 6
        elif self.bf16:
            bytes_per_logit = 2
        else:
            bytes_per_logit = 4
        tokens = min(trial.micro_batch * self.sequence_length, self.chunk)
        return tokens * self.vocab_size * bytes_per_logit

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
        for trial in trials_of(most, rows):
            if self.fits(trial, memory_bytes):
                return trial
        return None


def check_memory(
    estimate: MemoryEstimate, requested: MemoryTrial, rows: int, memory_bytes: float
) -> tuple[Finding, MemoryTrial | None]:
    """Check whether a micro-batch fits on a GPU. Return the finding, and the memory setting to use, if any fits."""
    form = f"{requested.micro_batch} rows x {estimate.sequence_length} tokens"
    if requested.checkpointing:
        form += ", checkpointed,"
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
    sizes: list[int] = []
    limit = most.micro_batch
    while limit:
        largest = micro_batches(rows, limit)[0]
        sizes.append(largest)
        limit = largest // 2
    checkpointed = [MemoryTrial(rows, True) for rows in sizes]
    if most.checkpointing:
        return checkpointed
    return [MemoryTrial(rows) for rows in sizes] + checkpointed

"""Divide optimizer steps into micro-batches for all processes, without torch."""

from gpt2_repro.data.arguments import DataArguments
from gpt2_repro.errors import UserError
from gpt2_repro.recipe import TrainingSection, count_steps
from gpt2_repro.run_record.environment import BatchPlan


MOST_ROWS_PER_PASS = 64


def plan_run(training: TrainingSection, data: DataArguments, *, num_processes: int) -> BatchPlan:
    """Return the batch plan of a recipe.

    Raises UserError if the tokens per step do not fit the micro-batch.

    Args:
        num_processes: the world size.
    """
    length = data.sequence_length
    micro_batch = training.per_device_train_batch_size
    if not micro_batch:
        micro_batch = micro_batches(training.tokens_per_step // (length * num_processes))[0]
    return plan_batches(
        training.tokens_per_step,
        length,
        micro_batch_size=micro_batch,
        num_processes=num_processes,
        max_steps=count_steps(training),
    )


def plan_batches(
    tokens_per_step: int, sequence_length: int, *, micro_batch_size: int, num_processes: int, max_steps: int
) -> BatchPlan:
    """Return the batch plan, or raise UserError if the step does not divide."""
    tokens_per_pass = micro_batch_size * sequence_length * num_processes
    accumulation, rest = divmod(tokens_per_step, tokens_per_pass)
    if rest or not accumulation:
        rows, rest = divmod(tokens_per_step, sequence_length * num_processes)
        fitting = [] if rest else micro_batches(rows, rows)
        nearest = min(fitting, key=lambda size: (abs(size - micro_batch_size), size), default=None)
        below = max(1, accumulation) * tokens_per_pass
        fix = f"--per_device_train_batch_size {nearest} or " if nearest else ""
        a_pass = f"{micro_batch_size} rows x {sequence_length} tokens x {num_processes} processes"
        fix += f"--tokens_per_step {below} or {below + tokens_per_pass}"
        raise UserError(f"tokens_per_step {tokens_per_step:,} is not a multiple of {a_pass}. Pass {fix}.")
    return BatchPlan(tokens_per_step, sequence_length, micro_batch_size, num_processes, accumulation, max_steps)


def micro_batches(rows: int, most: int = MOST_ROWS_PER_PASS) -> list[int]:
    """Return the micro-batch sizes that divide the rows per step of one process, largest first."""
    return [size for size in range(min(rows, most), 1, -1) if rows % size == 0] + [1]

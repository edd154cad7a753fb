"""Divide optimizer steps into micro-batches for all processes, without torch."""

import dataclasses
import math
from typing import Literal

from gpt2_repro.errors import UserError


IGNORED = -100  # label of a position without a target; the default ignore_index of torch
SamplingStrategy = Literal["random", "sequential", "group_by_length"]  # transformers' names
BY_LENGTH: SamplingStrategy = "group_by_length"
MOST_ROWS_PER_PASS = 64
MOST_TOKENS = 10**18  # larger counts are mistakes, and their products would not fit into a float


class TokenCount(int):
    """A number of tokens, parsed from `10e9`, `10_000_000_000` or `524288`."""

    def __new__(cls, value: object) -> "TokenCount":
        number = float(str(value))
        if not number.is_integer() or not 0 <= number < MOST_TOKENS:
            raise ValueError(f"{value!r} is not a whole number of tokens")
        return super().__new__(cls, int(number))


@dataclasses.dataclass(frozen=True)
class BatchPlan:
    """The number of optimizer steps in a run, and the forward passes in each step."""

    tokens_per_step: int
    sequence_length: int
    micro_batch_size: int  # rows per process in one forward pass
    num_processes: int
    gradient_accumulation_steps: int
    max_steps: int
    # If true, rows of similar length share a forward pass, which has as many rows as fit into the positions of a full
    # micro-batch. tokens_per_step then counts targets without padding, and a step can differ from it by up to one row.
    by_length: bool = False

    @property
    def rows_per_step(self) -> int:
        """Number of rows per optimizer step. If `by_length`, the smallest possible number."""
        return self.tokens_per_step // self.sequence_length

    @property
    def total_tokens(self) -> int:
        """Number of target tokens in the complete run."""
        return self.max_steps * self.tokens_per_step

    @property
    def positions_per_pass(self) -> int:
        """Maximum number of token positions in one forward pass on one device."""
        return self.micro_batch_size * self.sequence_length

    @property
    def passes_per_step(self) -> int:
        """Forward passes per optimizer step, summed over all processes."""
        return self.num_processes * self.gradient_accumulation_steps


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


def passes_by_length(tokens_per_step: int, *, rows: int, longest: int, shortest: int) -> int:
    """Return an upper bound on the forward passes of all processes per optimizer step.

    Rows of similar length, `longest` to `shortest` targets, share a pass of at most `rows` * `longest` positions.
    """
    # Proof: A step has S <= tokens_per_step + longest - 1 targets. A forward pass has up to C = rows * longest
    # positions. Rows are sorted, longest first. Pass j starts with a row of L_j targets and takes n_j = floor(C / L_j)
    # rows. As C / L_j >= rows, rounding down keeps more than rows / (rows + 1) of C. So n_j * L_j > F = C * rows /
    # (rows + 1). Each row of pass j is at least as long as the first row of pass j + 1, so every pass except the last
    # has more than F * L_{j+1} / L_j targets. Because x >= 1 + ln(x), these quotients add up to at least
    # N - 1 - ln(L_1 / L_N) for N passes. Therefore S > F * (N - 1 - ln(longest / shortest)), and
    # N < 1 + ln(longest / shortest) + S / F.
    filled = rows * longest * rows / (rows + 1)
    return math.floor(1 + math.log(longest / shortest) + (tokens_per_step + longest - 1) / filled)


def plan_by_length(
    tokens_per_step: int, *, longest: int, shortest: int, micro_batch_size: int, num_processes: int, max_steps: int
) -> BatchPlan:
    """Return the batch plan for rows of `shortest` to `longest` targets, or raise UserError."""
    passes = passes_by_length(tokens_per_step, rows=micro_batch_size, longest=longest, shortest=shortest)
    per_process = -(-passes // num_processes)
    if per_process * num_processes > tokens_per_step // longest:
        text = f"A step of {tokens_per_step:,} tokens may have fewer rows than forward passes"
        fix = "Pass a larger --tokens_per_step or --per_device_train_batch_size."
        raise UserError(f"{text}, because rows differ in length. {fix}")
    return BatchPlan(tokens_per_step, longest, micro_batch_size, num_processes, per_process, max_steps, by_length=True)

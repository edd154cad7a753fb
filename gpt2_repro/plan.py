"""The batch plan of a recipe: full rows in equal passes, or rows of like length together. Pure arithmetic."""

import dataclasses
import math
from typing import Any

from gpt2_repro.batch_plan import BatchPlan, check_counts, count_steps, plan_batches
from gpt2_repro.errors import UserError


BY_LENGTH = "group_by_length"  # the train_sampling_strategy, by transformers' name


def plan_run(
    training: dict[str, Any],
    *,
    sequence_length: int,
    packing: str,
    min_length: int,
    num_processes: int,
    epoch_targets: int | None = None,
) -> BatchPlan:
    """The plan of a recipe on a number of processes.

    Args:
        training: the recipe's section.
        sequence_length: targets of the longest row.
        min_length: targets of the shortest row of packing wrap; 0 is 1.
        epoch_targets: of all rows, where the data is there.

    Raises UserError where tokens per step do not divide or cannot be cut, and where the strategy does not fit.
    """
    asked = {name: training[name] for name in ("tokens_per_step", "total_tokens", "max_steps")}
    asked |= {"micro_batch_size": training["per_device_train_batch_size"], "num_processes": num_processes}
    if training["train_sampling_strategy"] != BY_LENGTH:
        return plan_batches(**asked, sequence_length=sequence_length)
    check_strategy(training, packing=packing)
    plan = plan_by_length(**asked, longest=sequence_length, shortest=max(1, min_length))
    if epoch_targets is not None and epoch_targets < plan.tokens_per_step:
        raise UserError(
            f"the training rows have {epoch_targets:,} targets, less than one step of {plan.tokens_per_step:,}: use "
            "a smaller --tokens_per_step or prepare more text"
        )
    return plan


def check_strategy(training: dict[str, Any], *, packing: str) -> None:
    """Raise UserError where the recipe's sampling strategy does not fit its packing or torch_compile."""
    if training["train_sampling_strategy"] != BY_LENGTH:
        return
    option = f"--train_sampling_strategy {BY_LENGTH}"
    if packing != "wrap":
        raise UserError(
            f"with packing {packing} all rows have one length: leave out {option}, or prepare the data with "
            "--packing wrap"
        )
    if training["torch_compile"]:
        raise UserError(
            f"{option} gives every pass another shape, and --torch_compile would compile again for each: leave out one"
        )


def passes_by_length(tokens_per_step: int, *, rows: int, longest: int, shortest: int) -> int:
    """Batches that a step's rows always go into: sorted by length, each of at most rows * longest positions.

    A step has S <= tokens_per_step + longest - 1 targets. Greedy filling, longest rows first: batch j begins with a row
    of L_j targets and takes n_j = floor(C / L_j) rows, C = rows * longest. As C / L_j >= rows, the floor leaves more
    than rows / (rows + 1) of C: n_j * L_j > F = C * rows / (rows + 1). Each of its rows is at least as long as the
    next batch's first, so all batches but the last hold more than F * L_{j+1} / L_j targets. By x >= 1 + ln(x) those
    quotients sum to N - 1 - ln(L_1 / L_N) or more, so S > F * (N - 1 - ln(longest / shortest)), and the number of
    batches is N < 1 + ln(longest / shortest) + S / F.
    """
    filled = rows * longest * rows / (rows + 1)
    return math.floor(1 + math.log(longest / shortest) + (tokens_per_step + longest - 1) / filled)


def plan_by_length(
    *,
    tokens_per_step: int,
    longest: int,
    shortest: int,
    micro_batch_size: int,
    num_processes: int,
    total_tokens: int = 0,
    max_steps: int = 0,
) -> BatchPlan:
    """Derive accumulation and steps for batches of rows of like length, of `shortest` to `longest` targets.

    Raises UserError, with choices that work, where a step could have fewer rows than passes.
    """
    check_counts(tokens_per_step, longest, shortest, micro_batch_size, num_processes)

    def accumulation(tokens: int, rows: int) -> int:
        passes = passes_by_length(tokens, rows=rows, longest=longest, shortest=shortest)
        return -(-passes // num_processes)

    def fits(tokens: int, rows: int) -> bool:
        return accumulation(tokens, rows) * num_processes <= tokens // longest

    if not fits(tokens_per_step, micro_batch_size):
        fewest = tokens_per_step // longest
        larger = next((n for n in range(micro_batch_size, fewest + 1) if fits(tokens_per_step, n)), None)
        more = range(fewest + 1, 8 * fewest + 100 * num_processes)
        longer = next((n * longest for n in more if fits(n * longest, micro_batch_size)), None)
        choices = [f"--per_device_train_batch_size {larger}"] if larger else []
        choices += [f"--tokens_per_step {longer}"] if longer else []
        raise UserError(
            f"a step of {tokens_per_step:,} targets can have as few as {fewest:,} rows, and up to "
            f"{accumulation(tokens_per_step, micro_batch_size) * num_processes:,} passes of {micro_batch_size} x "
            f"{longest} positions: use {' or '.join(choices) or '--train_sampling_strategy random'}"
        )
    steps = count_steps(tokens_per_step, total_tokens, max_steps)
    passes = accumulation(tokens_per_step, micro_batch_size)
    return BatchPlan(tokens_per_step, longest, micro_batch_size, num_processes, passes, steps, by_length=True)


def extend_plan(
    plan: BatchPlan, extend_to: int, *, extensions: list[list[int]], step: int
) -> tuple[BatchPlan, list[list[int]]]:
    """A plan that goes on after its last step, and how: the stretches of steps [from, to] behind the schedule's own.

    Args:
        extend_to: targets of the whole run; 0 does not extend.
        extensions: of the checkpoint that the run goes on from.
        step: of that checkpoint, 0 where there is none.

    Raises UserError where there is nothing to extend, where that is no extension, and for a run that was extended and
    is now asked for without.
    """
    end = extensions[-1][1] if extensions else plan.max_steps
    if not extend_to:
        if extensions:
            raise UserError(f"this run was extended: type --extend_to {end * plan.tokens_per_step} to go on with it")
        return plan, []
    if not step:
        raise UserError("--extend_to extends a run that has a checkpoint, and there is none: use --total_tokens")
    steps = extend_to // plan.tokens_per_step
    if steps < end:
        raise UserError(
            f"--extend_to {extend_to} ends at step {steps:,}, and the run goes to step {end:,} without it: name more tokens"
        )
    further = [[step, steps]] if steps > end else []
    return dataclasses.replace(plan, max_steps=steps), [*extensions, *further]

"""Write the recipe that a number of dollars or hours allows on a machine."""

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

from gpt2_repro import cli
from gpt2_repro.config import DEFAULT
from gpt2_repro.errors import UserError
from gpt2_repro.files import write_whole
from gpt2_repro.hardware import Accelerator
from gpt2_repro.planning import cost
from gpt2_repro.planning.compute_optimal import choose
from gpt2_repro.planning.workload import workload_of
from gpt2_repro.preflight.commands import machines_of
from gpt2_repro.recipe import TrainingRecipe, load_recipe
from gpt2_repro.tokens import TokenCount


# Options that --budget and --hours can be combined with, besides those of preflight.
COMBINED = {"usd_per_hour", "accept_any_hardware", "use_cpu"}


class Limit(NamedTuple):
    """The limit of a run: --budget or --hours."""

    option: str
    value: float
    minutes: float

    @property
    def recipe_name(self) -> str:
        unit = "usd" if self.option == "budget" else "h"
        return f"budget_{self.value:g}{unit}"


def recipe_within(
    requested: TrainingRecipe, device: Accelerator, options: dict[str, dict[str, Any]]
) -> TrainingRecipe:
    """Write the recipe for --budget or --hours on a machine, and return it.

    Raises UserError if more than half of the time would be spent on other things than training steps.

    Args:
        options: the options of preflight that are not fields of a recipe.
    """
    if requested.path != DEFAULT:
        raise UserError(f"--budget and --hours write their own recipe. Leave out {requested.path}.")
    unused = sorted(requested.typed - {*options, *COMBINED})
    if unused:
        raise UserError(f"--budget and --hours write their own recipe. Pass --{unused[0]} to train.py afterwards.")
    if machines_of(device) > 1:
        raise UserError(f"--budget and --hours write a recipe for one machine. Pass --n {cost.CARDS_OF_A_MACHINE}.")
    speed = _speed(requested, device)
    limit = _shortest_limit(requested, device)
    minutes = limit.minutes / 2
    if _minutes_around(minutes, requested, device, speed) > minutes:
        problem = "More than half of the time would be spent around the training"
        raise UserError(f"{problem}. Pass a larger --{limit.option}, such as {2 * limit.value:g}.")
    for _ in range(5):  # the time of validations and checkpoints depends on the run
        minutes = limit.minutes - _minutes_around(minutes, requested, device, speed)

    card = cost.card_named(device.name)
    hours = limit.minutes / 60
    heading = f"A GPT-2 for {hours:.1f} hours on {device.count} x {card.card if card else device.name}."
    choice = choose(_flops_of(minutes, speed), device.count)
    text = choice.recipe(limit.recipe_name, heading, hours=hours)
    path = Path(f"{limit.recipe_name}.yaml")
    if path.exists() and not (path.is_file() and path.read_bytes() == text.encode()):
        raise UserError(f"{path} exists with other values. Delete or rename it.")
    write_whole(path, text)
    recipe = load_recipe([str(path), *cli.words_of(requested.overrides())])
    return dataclasses.replace(recipe, options=requested.options)


def _speed(requested: TrainingRecipe, device: Accelerator) -> float:
    """Return the speed of GPT-2 124M on all GPUs in tokens per second. Raises UserError if it is not known."""
    if requested.options.tokens_per_second:
        return requested.options.tokens_per_second
    card = cost.card_named(device.name)
    if card is None:
        raise UserError("The speed of this machine is not known. Pass --gpu, or --tokens_per_second for GPT-2 124M.")
    return card.tokens_per_second * device.count


def _shortest_limit(requested: TrainingRecipe, device: Accelerator) -> Limit:
    """Return the shorter one of --hours and --budget. Raises UserError if --budget has no price."""
    options = requested.options
    limits: list[Limit] = []
    if options.hours:
        limits.append(Limit("hours", options.hours, 60 * options.hours))
    if options.budget:
        usd_per_hour = requested.training.usd_per_hour
        list_price = cost.price_of(device.name)
        if not usd_per_hour and list_price:
            usd_per_hour = list_price.usd_per_hour * device.count
        if not usd_per_hour:
            raise UserError("--budget needs the price of the machine. Pass --usd_per_hour, or --hours instead.")
        limits.append(Limit("budget", options.budget, 60 * options.budget / usd_per_hour))
    return min(limits, key=lambda limit: limit.minutes)


def _flops_of(minutes: float, speed: float) -> float:
    return 60 * minutes * speed * cost.GPT2_FLOPS_PER_TOKEN


def _minutes_around(minutes: float, requested: TrainingRecipe, device: Accelerator, speed: float) -> float:
    """Return the minutes that a run needs besides a number of minutes of training steps."""
    choice = choose(_flops_of(minutes, speed), device.count)
    model = dataclasses.replace(requested.model, n_layer=choice.depth, n_head=choice.depth, n_embd=64 * choice.depth)
    sized = requested.with_training(
        tokens_per_step=TokenCount(choice.tokens_per_step), total_tokens=TokenCount(choice.tokens), warmup_steps=0
    )
    work = workload_of(dataclasses.replace(sized, model=model))
    tokens_per_second = speed * cost.GPT2_FLOPS_PER_TOKEN * work.tokens / work.flops
    activities = cost.budget(work, tokens_per_second, cards=device.count, basis="estimated")
    return sum(activity.minutes for activity in activities if activity.name != "training steps")

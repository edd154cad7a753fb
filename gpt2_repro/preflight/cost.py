"""Estimate the minutes and dollars of a run on a machine, and of 10B tokens on every card of the price table."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from gpt2_repro.compute import ModelScale, checkpoint_bytes, count_steps
from gpt2_repro.errors import UserError
from gpt2_repro.preflight.prices import card_of, price_of, price_table
from gpt2_repro.units import size, tokens


Basis = Literal["published", "estimated", "typed", "assumed"]
TEN_BILLION = 10_000_000_000
GPT2_FLOPS_PER_TOKEN = 855e6  # of the 124M model in rows of 1,024 tokens (6N + 12LCT), measured in the table of cards
# Assumed minutes of a rented machine around the training; a first start installs and compiles.
BOOT, ENVIRONMENT, COMPILING, EVALUATION = 3.0, 4.0, 1.5, 5.0
SAVE_SECONDS, SAMPLE_SECONDS = 2.0, 0.6
SYNC_BYTES_PER_SECOND = 50e6
POSITIVE = ("tokens_per_step", "per_device_train_batch_size", "eval_steps", "save_steps")
NOT_NEGATIVE = (
    *("stop_at_step", "eval_tokens", "hellaswag_steps", "sample_steps", "save_minutes"),
    *("keep_checkpoints", "keep_every_steps", "usd_per_hour"),
)


class Entry(NamedTuple):
    """A part of the cost in minutes, and where the number comes from."""

    name: str
    minutes: float
    basis: Basis


@dataclasses.dataclass(frozen=True)
class Work:
    """What a run has to do.

    Args:
        tokens, steps: of the training; flops: of all its tokens.
        validations: how many, of eval_tokens each; hellaswag_passes: of hellaswag_tokens each; samples: how many.
        save_steps, save_minutes: between two checkpoints, whichever comes first; 0 for none.
        checkpoint_bytes, final_bytes: of a checkpoint, and of the model in fp32.
        keep_checkpoints: the newest ones, 0 for all; keep_every_steps: those that are never deleted, 0 for none.
    """

    tokens: int
    steps: int
    flops: float
    eval_tokens: int
    validations: int
    hellaswag_tokens: int
    hellaswag_passes: int
    samples: int
    save_steps: int
    save_minutes: float
    checkpoint_bytes: int
    final_bytes: int
    keep_checkpoints: int
    keep_every_steps: int

    def saves(self, training_minutes: float = 0.0) -> int:
        """Return the number of checkpoints; by the steps alone if the minutes are not known."""
        if not self.save_steps:
            return 0
        if self.save_minutes and self.save_steps * training_minutes / self.steps > self.save_minutes:
            return 1 + int(training_minutes / self.save_minutes)
        return -(-self.steps // self.save_steps)

    @property
    def run_bytes(self) -> int:
        """Disk space at most: kept checkpoints, the best one, the one being written, and the final model."""
        newest = min(self.keep_checkpoints or self.saves(), max(1, self.saves()))
        never_deleted = self.steps // self.keep_every_steps if self.keep_every_steps else 0
        return (newest + never_deleted + 2) * self.checkpoint_bytes + self.final_bytes


def work_of(training: Mapping[str, Any], scale: ModelScale, *, validation_tokens: int, hellaswag_tokens: int) -> Work:
    """Return the work of a recipe.

    Args:
        training: the section of the recipe.
        scale: of its model.
        validation_tokens: of the whole split, used if eval_tokens is 0.
        hellaswag_tokens: of one pass over HellaSwag.

    Raises UserError if a number is out of range.
    """
    for name in (*POSITIVE, *NOT_NEGATIVE):
        if not (least := int(name in POSITIVE)) <= training[name] < float("inf"):
            raise UserError(f"--{name} {training[name]} must be a number of at least {least}")
    steps = count_steps(training["tokens_per_step"], training["total_tokens"], training["max_steps"])
    steps = min(training["stop_at_step"] or steps, steps)
    count = steps * training["tokens_per_step"]
    validations = 0 if training["eval_strategy"] == "no" else _times(steps, training["eval_steps"])
    sampled = training["sample_steps"] if training["sample_tokens"] else 0
    return Work(
        tokens=count,
        steps=steps,
        flops=float(count * scale.flops_per_token),
        eval_tokens=min(training["eval_tokens"] or validation_tokens, validation_tokens),
        validations=validations,
        hellaswag_tokens=hellaswag_tokens,
        # Both run with a validation.
        hellaswag_passes=min(validations, _times(steps, training["hellaswag_steps"])),
        samples=min(validations, _times(steps, sampled)),
        save_steps=0 if training["save_strategy"] == "no" else training["save_steps"],
        save_minutes=training["save_minutes"],
        checkpoint_bytes=checkpoint_bytes(scale.trained, bf16=training["bf16"]),
        final_bytes=4 * scale.parameters,
        keep_checkpoints=training["keep_checkpoints"],
        keep_every_steps=training["keep_every_steps"],
    )


def is_as_published(training: Mapping[str, Any], *, model_type: str) -> bool:
    """Return whether the published speeds apply: a compiled GPT-2 in bf16 without activation checkpointing."""
    compiled = training["torch_compile"] is not False
    return model_type == "gpt2" and training["bf16"] and compiled and not training["activation_checkpointing"]


def budget(work: Work, tokens_per_second: float, *, basis: Basis) -> list[Entry]:
    """Return all paid minutes from boot to stop, in order.

    Args:
        tokens_per_second: of all cards in a training step; a forward pass takes a third of a step.
        basis: of that speed.
    """
    training = work.tokens / tokens_per_second / 60
    measured, scored = work.validations * work.eval_tokens, work.hellaswag_passes * work.hellaswag_tokens
    entries = [
        Entry("boot", BOOT, "assumed"),
        Entry("environment", ENVIRONMENT, "assumed"),
        Entry("compiling", COMPILING, "assumed"),
        Entry("training steps", training, basis),
        Entry("validation", measured / 3 / tokens_per_second / 60, basis),
        Entry("HellaSwag", scored / 3 / tokens_per_second / 60, basis),
        Entry("samples", work.samples * SAMPLE_SECONDS / 60, "assumed"),
        Entry("saving", work.saves(training) * SAVE_SECONDS / 60, "assumed"),
        Entry("evaluation", EVALUATION, "assumed"),
        Entry("sync", (work.checkpoint_bytes + work.final_bytes) / SYNC_BYTES_PER_SECOND / 60, "assumed"),
    ]
    return [entry for entry in entries if entry.minutes]


def ranking() -> list[dict[str, Any]]:
    """Return the cost of 10B tokens of GPT-2 124M, training steps alone, for every listed price; cheapest first."""
    offers = []
    for price in price_table():
        if card := card_of(price.card):
            hours = TEN_BILLION / card.tokens_per_second / 3600
            cost = {"usd": hours * price.usd_per_hour, "hours": hours, "speed": card.speed}
            offers.append(dataclasses.asdict(price) | cost)
    return sorted(offers, key=lambda offer: offer["usd"])


def plan_on(
    work: Work,
    name: str,
    cards: int,
    *,
    usd_per_hour: float,
    tokens_per_second: float | None,
    as_published: bool = True,
) -> dict[str, Any]:
    """Return minutes and dollars of the work on a machine, and the ranking of all cards.

    The speeds of the table are those of GPT-2 124M; other models are scaled by their FLOPs per token.

    Args:
        name: of the card, as in the driver or the table.
        usd_per_hour: of the whole machine, 0 for the list price.
        tokens_per_second: of all cards, None for the table's.
        as_published: whether the published speeds apply; if not, only `tokens_per_second` counts.
    """
    card, price = card_of(name), price_of(name)
    ratio = work.flops / work.tokens / GPT2_FLOPS_PER_TOKEN
    another = abs(ratio - 1) > 0.02
    speed, source = None, None
    basis: Basis = "published"
    if tokens_per_second:
        speed, source, basis = tokens_per_second, "as typed", "typed"
    elif card and as_published:
        speed = card.tokens_per_second * cards / (ratio if another else 1)
        source = f"{card.speed}, by this model's FLOPs a token" if another else card.speed
        basis = "estimated" if another or card.is_estimated else "published"
    paid = usd_per_hour or (price.usd_per_hour * cards if price else None)
    entries = budget(work, speed, basis=basis) if speed else []
    minutes = sum(entry.minutes for entry in entries)
    fitting = card if card and not another else None  # the table's micro-batches are those of 124M
    return {
        "machine": {
            "card": card.card if card else name,
            "cards": cards,
            "memory_gb": card.memory_gb if card else None,
            "micro_batch": fitting.micro_batch if fitting else None,
            "micro_batch_is": fitting.micro_batch_is if fitting else None,
            "tokens_per_second": speed,
            "usd_per_hour": paid,
        },
        "speed": source,
        "price": "as typed" if usd_per_hour else str(price) if price else None,
        "work": dataclasses.asdict(work),
        "run_bytes": work.run_bytes,
        "budget": [entry._asdict() for entry in entries],
        "minutes": minutes or None,
        "usd": minutes / 60 * paid if minutes and paid else None,
        "ranking": ranking(),
    }


def plan_lines(planned: dict[str, Any]) -> list[str]:
    """Return the plan as lines for the terminal."""
    work, machine = planned["work"], planned["machine"]
    lines = ["", f"{work['steps']:,} steps, {tokens(work['tokens'])} tokens on {machine['cards']} x {machine['card']}"]
    lines += [f"  {its['name']:<16} {its['minutes']:>7.1f} min  {its['basis']}" for its in planned["budget"]]
    if planned["budget"]:
        paid = f"${machine['usd_per_hour']:,.2f} an hour ({planned['price']})" if machine["usd_per_hour"] else ""
        dollars = f", ${planned['usd']:,.2f} at {paid}" if paid else ""
        lines += [f"  {'in all':<16} {planned['minutes']:>7.1f} min{dollars}", f"  speed: {planned['speed']}"]
    else:
        lines.append("  The speed is not known. Pass --tokens_per_second, or --gpu CARD for another machine.")
    if machine["micro_batch"]:
        option = f"--per_device_train_batch_size {machine['micro_batch']}"
        lines.append(f"  start with {option} on {machine['memory_gb']} GB, {machine['micro_batch_is']}")
    sizes = f"a checkpoint {size(work['checkpoint_bytes'])} under DeepSpeed, final {size(work['final_bytes'])}"
    lines += [
        f"  {work['flops']:.3g} FLOPs; {sizes}",
        f"  disk: {size(planned['data_bytes'])} for the data, {size(planned['run_bytes'])} for the run",
        "",
        "10B tokens of GPT-2 124M on one card, training steps alone (* speed estimated):",
    ]
    for offer in planned["ranking"]:
        star = "*" if offer["speed"].startswith("estimated") else " "
        price = f"{offer['provider']:<17} ${offer['usd_per_hour']:.2f} an hour, {offer['date']}"
        lines.append(f"  ${offer['usd']:>6.2f}  {offer['hours']:>5.1f} h  {offer['card'] + star:<16} {price}")
    return lines


def _times(steps: int, every: int) -> int:
    """Return how often something happens before the first step, every so many steps, and after the last."""
    return 1 + -(-steps // every) if every else 0

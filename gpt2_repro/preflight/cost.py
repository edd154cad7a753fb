"""Estimate the minutes and dollars of a run on a machine, and of 10B tokens on every card of the price table.

Prices and speeds of cards are tables in YAML, each row with its source.
"""

import dataclasses
import datetime
import functools
import re
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from gpt2_repro.formatting import size, tokens
from gpt2_repro.hardware import is_named


GPT2_FLOPS_PER_TOKEN = 855e6  # of the 124M model in rows of 1,024 tokens (6N + 12LCT), measured in the table of cards
# Assumed minutes of a rented machine around the training; a first start installs and compiles.
BOOT, ENVIRONMENT, COMPILING, EVALUATION = 3.0, 4.0, 1.5, 5.0
NOT_ON_CPU = ("boot", "environment", "compiling", "evaluation", "sync")
SAVE_SECONDS, SAMPLE_SECONDS = 2.0, 0.6
SYNC_BYTES_PER_SECOND = 50e6


class Price(NamedTuple):
    """A list price of one card of the table of cards."""

    card: str
    provider: str
    usd_per_hour: float
    date: datetime.date
    source: str

    def __str__(self) -> str:
        return f"{self.provider}'s list price of {self.date}"


class Card(NamedTuple):
    """The performance of one card with GPT-2 124M.

    Args:
        name: a part of its name in the driver.
        tokens_per_second: of training, rows of 1,024 tokens.
        speed: the source of that measurement, or how it is estimated.
    """

    card: str
    name: str
    memory_gb: int
    tokens_per_second: float
    speed: str


@functools.cache
def price_table() -> tuple[Price, ...]:
    """Return all prices; the first of a card counts."""
    return tuple(Price(**row) for row in _rows("gpu_prices.yaml"))


@functools.cache
def card_table() -> tuple[Card, ...]:
    """Return all cards; the first that fits a name counts."""
    return tuple(Card(**row) for row in _rows("cards.yaml"))


def price_of(name: str) -> Price | None:
    """Return the price of a card by its name in the driver or the table, or None."""
    card = card_of(name)
    return next((row for row in price_table() if card and row.card == card.card), None)


def card_of(name: str) -> Card | None:
    """Return a card by its name in the driver or the table, or None."""
    return next(iter(cards_named(name)), None)


def cards_named(name: str) -> list[Card]:
    """Return the cards that a name can mean: the driver's name, or words of the table's name in order."""
    if found := [row for row in card_table() if is_named(row.name, name)]:
        return found[:1]
    asked = _words(name)
    return [row for row in card_table() if asked and asked in _words(row.card)]


def _words(name: str) -> str:
    """Return `A100 SXM 40GB` as ` a100 sxm 40 gb `, to find whole words only."""
    words = re.findall(r"[a-z]+\d*[a-z]*|\d+", name.lower())
    return f" {' '.join(words)} " if words else ""


def _rows(name: str) -> list[dict[str, Any]]:
    return yaml.safe_load(Path(__file__).with_name(name).read_text())


@dataclasses.dataclass(frozen=True)
class Workload:
    """What a run has to do.

    Args:
        tokens, steps: of the training; flops: of all its tokens.
        parameters, vocab_size: while training, with the padding of the vocabulary.
        eval_tokens, hellaswag_tokens: of all validations and all passes over HellaSwag; samples: how many.
        saves: checkpoints by steps; save_minutes: at most between two of them, 0 for no limit.
        checkpoint_bytes, final_bytes: of a checkpoint, and of the model in fp32.
        run_bytes: disk space at most: kept checkpoints, the best one, the one being written, and the final model.
        data_bytes: of the prepared data; missing_bytes: at most, while the data is prepared; 0 if it is there.
        is_reference: whether the published speeds apply: a compiled GPT-2 in bf16 without activation checkpointing.
    """

    tokens: int
    steps: int
    flops: float
    parameters: int
    vocab_size: int
    eval_tokens: int
    hellaswag_tokens: int
    samples: int
    saves: int
    save_minutes: float
    checkpoint_bytes: int
    final_bytes: int
    run_bytes: int
    data_bytes: float
    missing_bytes: float
    is_reference: bool


def budget(work: Workload, tokens_per_second: float, *, basis: str) -> list[dict[str, Any]]:
    """Return name, minutes and basis of everything that is paid from boot to stop, in order.

    Args:
        tokens_per_second: of all cards in a training step; a forward pass takes a third of a step.
        basis: of that speed: published, estimated, typed, or measured on this CPU, which is not rented.
    """
    training = work.tokens / tokens_per_second / 60
    saves = max(work.saves, 1 + int(training / work.save_minutes) if work.save_minutes else 0)
    entries: list[tuple[str, float, str]] = [
        ("boot", BOOT, "assumed"),
        ("environment", ENVIRONMENT, "assumed"),
        ("compiling", COMPILING, "assumed"),
        ("training steps", training, basis),
        ("validation", work.eval_tokens / 3 / tokens_per_second / 60, basis),
        ("HellaSwag", work.hellaswag_tokens / 3 / tokens_per_second / 60, basis),
        ("samples", work.samples * SAMPLE_SECONDS / 60, "assumed"),
        ("saving", saves * SAVE_SECONDS / 60, "assumed"),
        ("evaluation", EVALUATION, "assumed"),
        ("sync", (work.checkpoint_bytes + work.final_bytes) / SYNC_BYTES_PER_SECOND / 60, "assumed"),
    ]
    left_out = NOT_ON_CPU if basis == "measured" else ()
    entries = [entry for entry in entries if entry[1] and entry[0] not in left_out]
    return [{"name": name, "minutes": minutes, "basis": basis} for name, minutes, basis in entries]


def ranking() -> list[dict[str, Any]]:
    """Return the cost of 10B tokens of GPT-2 124M, training steps alone, for every listed price; cheapest first."""
    offers = []
    for price in price_table():
        if card := card_of(price.card):
            hours = 10e9 / card.tokens_per_second / 3600
            cost = {"usd": hours * price.usd_per_hour, "hours": hours, "speed": card.speed}
            offers.append(price._asdict() | cost)
    return sorted(offers, key=lambda offer: offer["usd"])


def plan_on(
    work: Workload,
    name: str,
    cards: int,
    *,
    usd_per_hour: float = 0.0,
    tokens_per_second: float | None = None,
    measured: bool = False,
) -> dict[str, Any]:
    """Return minutes and dollars of the work on a machine, and the ranking of all cards.

    The speeds of the table are those of a compiled GPT-2 124M in bf16 without activation checkpointing. Other sizes are
    scaled by their FLOPs per token; anything else needs `tokens_per_second`.

    Args:
        name: of the card, as in the driver or the table.
        usd_per_hour: of the whole machine, 0 for the list price.
        tokens_per_second: of all cards, None for the table's.
        measured: whether that is this CPU's measured speed, not a typed one.
    """
    card, price = card_of(name), price_of(name)
    ratio = work.flops / work.tokens / GPT2_FLOPS_PER_TOKEN
    is_124m = abs(ratio - 1) <= 0.02
    speed, basis = tokens_per_second, "measured" if measured else "typed"
    source = (f"{speed:,.0f} tokens/s, measured on this CPU" if measured else "as typed") if speed else None
    if card and not speed and work.is_reference:
        speed = card.tokens_per_second * cards / (1 if is_124m else ratio)
        source = card.speed if is_124m else f"{card.speed}, by this model's FLOPs a token"
        basis = "published" if is_124m and not card.speed.startswith("estimated") else "estimated"
    paid = usd_per_hour or (price.usd_per_hour * cards if price else None)
    entries = budget(work, speed, basis=basis) if speed else []
    minutes = sum(entry["minutes"] for entry in entries)
    return {
        "machine": {
            "card": card.card if card else name,
            "cards": cards,
            "memory_gb": card.memory_gb if card else None,
            "tokens_per_second": speed,
            "usd_per_hour": paid,
        },
        "speed": source,
        "price": "as typed" if usd_per_hour else str(price) if price else None,
        "work": dataclasses.asdict(work),
        "budget": entries,
        "minutes": minutes or None,
        "usd": minutes / 60 * paid if minutes and paid else None,
        "ranking": ranking(),
    }


def plan_lines(planned: dict[str, Any]) -> list[str]:
    """Return the plan as lines for the terminal."""
    work, machine = planned["work"], planned["machine"]
    lines = ["", f"{work['steps']:,} steps, {tokens(work['tokens'])} tokens on {machine['cards']} x {machine['card']}"]
    lines += [f"  {its['name']:<16} {its['minutes']:>7,.1f} min  {its['basis']}" for its in planned["budget"]]
    if planned["budget"]:
        paid = f"${machine['usd_per_hour']:,.2f} an hour ({planned['price']})" if machine["usd_per_hour"] else ""
        dollars = f", ${planned['usd']:,.2f} at {paid}" if paid else ""
        lines += [f"  {'in all':<16} {planned['minutes']:>7,.1f} min{dollars}", f"  speed: {planned['speed']}"]
    else:
        lines.append("  The speed is not known. Pass --tokens_per_second, or --gpu CARD for another machine.")
    sizes = f"a checkpoint {size(work['checkpoint_bytes'])} under DeepSpeed, final {size(work['final_bytes'])}"
    lines += [
        f"  {work['flops']:.3g} FLOPs; {sizes}",
        f"  disk: {size(work['data_bytes'])} for the data, {size(work['run_bytes'])} for the run",
        "",
        "10B tokens of GPT-2 124M on one card, training steps alone (* speed estimated):",
    ]
    for offer in planned["ranking"]:
        star = "*" if offer["speed"].startswith("estimated") else " "
        price = f"{offer['provider']:<17} ${offer['usd_per_hour']:.2f} an hour, {offer['date']}"
        lines.append(f"  ${offer['usd']:>6.2f}  {offer['hours']:>5.1f} h  {offer['card'] + star:<16} {price}")
    return lines

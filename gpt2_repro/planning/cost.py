"""Estimate the minutes and dollars of a run from list prices and training speeds."""

import dataclasses
import datetime
import re
from typing import NamedTuple

from gpt2_repro.files import read_table
from gpt2_repro.hardware import is_named, peak_flops
from gpt2_repro.text import Cell, Table, duration


# FLOPs per token of the model that the speeds in cards.yaml belong to: 124M, rows of 1,024 tokens (6N + 12LCT).
GPT2_FLOPS_PER_TOKEN = 855e6
# Assumed minutes that a rented machine needs before and after training. The first start installs and compiles. The
# evaluation is for models with up to 300M parameters.
BOOT, ENVIRONMENT, COMPILING, EVALUATION = 3.0, 4.0, 1.5, 5.0
SAVE_SECONDS, SAMPLE_SECONDS = 2.0, 0.6
SYNC_BYTES_PER_SECOND = 50e6


class Price(NamedTuple):
    """The list price of one GPU at one provider."""

    card: str
    provider: str
    usd_per_hour: float
    date: datetime.date
    source: str

    def __str__(self) -> str:
        return f"{self.provider}'s list price of {self.date}"


class Card(NamedTuple):
    """A type of GPU and its training speed with GPT-2 124M."""

    card: str  # such as `A100 SXM 80 GB`
    name: str  # words that identify the GPU in the name that the driver reports
    memory_gb: int | None  # None if unknown
    tokens_per_second: float
    speed: str  # where the speed was published, or how it was measured or estimated
    bf16: bool = True  # False if the GPU cannot multiply in bf16. The speed is then that of fp16.

    @property
    def basis(self) -> str:
        """The basis of the speed, for `budget`."""
        bases = {"estimated": "estimated", "measured": "measured on one card"}
        return bases.get(self.speed.split()[0], "published")


CARDS = {row["card"]: Card(**row) for row in read_table(__file__, "cards.yaml")}
PRICES = tuple(Price(**row) for row in read_table(__file__, "gpu_prices.yaml"))
# Share of the peak FLOP/s that training uses, for GPUs that are not in cards.yaml: the lowest share of a published speed,
# 3M tokens/s on 8 x H100 SXM (jjschwartz.github.io, scaling-gpt2).
LEAST_SHARE = 0.32


def price_of(name: str) -> Price | None:
    """Return the first list price of the first card that matches `name`, or None."""
    return next((price for card in cards_named(name)[:1] for price in PRICES if price.card == card.card), None)


def cards_named(name: str) -> list[Card]:
    """Return the cards that match a driver's GPU name, or words of a name in cards.yaml.

    A GPU that is not in cards.yaml gets an estimated speed if its peak FLOP/s is known.
    """
    if matching := [card for card in CARDS.values() if is_named(card.name, name)]:
        return matching[:1]
    requested = _words(name)
    if matching := [card for card in CARDS.values() if requested and requested <= _words(card.card)]:
        return matching
    peak = peak_flops(name)
    speed = f"estimated at {LEAST_SHARE:.0%} of the peak, the lowest share of a published speed"
    return [Card(name, name, None, LEAST_SHARE * peak / GPT2_FLOPS_PER_TOKEN, speed)] if peak else []


def _words(name: str) -> set[str]:
    """Return the words of a name in lower case.

    A unit after a number is a word of its own, and so is `rtx`: `A100 40GB` has the words a100, 40 and gb.
    """
    return set(re.findall(r"rtx|[a-z]+\d*[a-z]*|\d+", name.lower()))


@dataclasses.dataclass(frozen=True)
class Workload:
    """The computation, storage and memory that a run needs."""

    tokens: int
    steps: int
    flops: float  # of all training tokens
    parameters: int  # with those for the padding of the vocabulary
    vocab_size: int  # with padding
    eval_tokens: int  # of all validations
    hellaswag_tokens: int  # of all HellaSwag evaluations
    samples: int
    saves: int  # checkpoints that are saved because of `save_steps`
    kept: int  # checkpoints in the run directory when the run has ended, with the best one
    save_minutes: float  # longest time between two checkpoints, 0 for no limit
    checkpoint_bytes: int
    final_bytes: int
    run_bytes: int  # the kept checkpoints, the rolling one, the best, one being written, and the final model
    data_bytes: float
    missing_bytes: float  # peak of the data preparation, 0 if the data is prepared
    model_type: str
    is_fast: bool  # compiled, dense, in 16 bits, without activation checkpointing, as for cards.yaml


class Activity(NamedTuple):
    """What a rented machine does, and for how long."""

    name: str
    minutes: float
    basis: str  # of the speed: "typed" (passed as an option), one of `Card.basis`, or "assumed"


class RunCost(NamedTuple):
    """Minutes and dollars of a run on a machine."""

    card: str
    cards: int
    speed: str | None  # origin of the speed
    usd_per_hour: float | None
    price: str | None  # origin of the price
    budget: list[Activity]

    @property
    def minutes(self) -> float | None:
        """The minutes of all activities, or None if the speed is not known."""
        return sum(activity.minutes for activity in self.budget) or None

    @property
    def usd(self) -> float | None:
        """The total price, or None if the speed or the price is not known."""
        return self.minutes / 60 * self.usd_per_hour if self.minutes and self.usd_per_hour else None

    def lines(self) -> list[str]:
        """Return the time and cost as lines of text."""
        heading = f"Time and cost on {self.cards} x {self.card}"
        if not self.minutes:
            fix = "" if self.card in CARDS else ", or --gpu CARD to plan for another machine"
            return [f"{heading}: the speed of this run is not known. Pass --tokens_per_second{fix}."]
        unknown = f"{duration(60 * self.minutes)} Pass --usd_per_hour for the cost."
        cost = f"${self.usd:,.2f} at ${self.usd_per_hour:,.2f} an hour ({self.price})" if self.usd else unknown
        cells = [
            [Cell(name), Cell(f"{time:,.1f} min", "number"), Cell(basis)]
            for name, time, basis in [*self.budget, Activity("total", self.minutes, cost)]
        ]
        return [f"{heading}:", *Table(["activity", "time", "basis"], cells).lines(), f"speed: {self.speed}"]


def budget(work: Workload, tokens_per_second: float, *, basis: str) -> list[Activity]:
    """Return the activities on a rented machine.

    The basis of the speed, of all GPUs together, is "typed" (passed as an option) or one of `Card.basis`.
    """
    training = work.tokens / tokens_per_second / 60
    saves = max(work.saves, 1 + int(training / work.save_minutes) if work.save_minutes else 0)
    copied = work.kept * work.checkpoint_bytes + work.final_bytes  # by runpod/run_and_stop.sh
    activities = [
        Activity("boot", BOOT, "assumed"),
        Activity("environment", ENVIRONMENT, "assumed"),
        Activity("compiling", COMPILING, "assumed"),
        Activity("training steps", training, basis),
        # Three times as fast as training: a forward pass takes a third of the time of a training pass.
        Activity("validation", work.eval_tokens / 3 / tokens_per_second / 60, basis),
        Activity("HellaSwag", work.hellaswag_tokens / 3 / tokens_per_second / 60, basis),
        Activity("samples", work.samples * SAMPLE_SECONDS / 60, "assumed"),
        Activity("saving", saves * SAVE_SECONDS / 60, "assumed"),
        Activity("evaluation", EVALUATION * max(1, work.parameters / 300e6), "assumed"),  # on one GPU
        Activity("sync", copied / SYNC_BYTES_PER_SECOND / 60, "assumed"),
    ]
    return [activity for activity in activities if activity.minutes]


def cost_of(work: Workload, name: str, cards: int, *, usd_per_hour: float = 0, speed: float = 0) -> RunCost:
    """Return minutes and dollars of a run on a machine.

    Args:
        name: GPU name that the driver reports, or some words of a card's name in cards.yaml.
        cards: number of GPUs.
        usd_per_hour: price of the complete machine, 0 for the list price.
        speed: tokens per second of all GPUs together, 0 for the speed in cards.yaml.
    """
    card, price = next(iter(cards_named(name)), None), price_of(name)
    ratio = work.flops / work.tokens / GPT2_FLOPS_PER_TOKEN
    is_124m = work.model_type == "gpt2" and abs(ratio - 1) <= 0.02
    source, basis = f"{speed:,.0f} tokens/s, passed as an option" if speed else None, "typed"
    if card and not speed and work.is_fast:
        speed = card.tokens_per_second * cards / (1 if is_124m else ratio)
        source = card.speed if is_124m else f"{card.speed}; scaled from GPT-2 124M by the FLOPs per token"
        basis = card.basis if is_124m else "estimated"
    return RunCost(
        card=card.card if card else name,
        cards=cards,
        speed=source,
        usd_per_hour=usd_per_hour or (price.usd_per_hour * cards if price else None),
        price="passed as an option" if usd_per_hour else str(price) if price else None,
        budget=budget(work, speed, basis=basis) if speed else [],
    )


def offer_lines() -> list[str]:
    """Return the ten cheapest list prices for GPT-2 124M on 10B tokens as lines of text."""
    # Training steps only, without start-up, validation, saving and evaluation.
    times = [(10e9 / CARDS[price.card].tokens_per_second / 3600, price) for price in PRICES]
    offers = sorted((hours * price.usd_per_hour, hours, price) for hours, price in times)
    cells = [
        [Cell(f"${usd:,.2f}", "number"), Cell(f"{hours:.1f} h", "number")]
        + [Cell(price.card + "*" * (CARDS[price.card].basis == "estimated"))]
        + [Cell(f"${price.usd_per_hour:.2f} an hour, {price.provider}, {price.date}")]
        for usd, hours, price in offers[:10]
    ]
    title = "Cost of training GPT-2 124M on 10B tokens with one GPU, training steps only (*: estimated speed):"
    return [title, *Table(["cost", "time", "GPU", "list price"], cells).lines()]

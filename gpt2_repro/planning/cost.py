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
# evaluation is for models with up to 300M parameters on one GPU. Its first part, until the processes have imported
# lm-eval, opened the tasks and loaded the model, takes the same time on several GPUs.
BOOT = 3.0
ENVIRONMENT = 4.0
COMPILING = 1.5
EVALUATION = 5.0
EVALUATION_START = 1.0
CARDS_OF_A_MACHINE = 8
SAVE_SECONDS = 2.0
SAMPLE_SECONDS = 0.6
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
        origin = self.speed.split()[0]
        if origin == "estimated":
            return "estimated"
        return "measured on one card" if origin == "measured" else "published"


CARDS = {row["card"]: Card(**row) for row in read_table(__file__, "cards.yaml")}
PRICES = tuple(Price(**row) for row in read_table(__file__, "gpu_prices.yaml"))
# Share of the peak FLOP/s that training uses, for GPUs that are not in cards.yaml: the lowest share of a published speed,
# 3M tokens/s on 8 x H100 SXM (jjschwartz.github.io, scaling-gpt2).
LEAST_SHARE = 0.32


def price_of(name: str) -> Price | None:
    """Return the first list price of the first card that matches `name`, or None."""
    card = card_named(name)
    if card is None:
        return None
    prices = [price for price in PRICES if price.card == card.card]
    return prices[0] if prices else None


def card_named(name: str) -> Card | None:
    """Return the first card that matches `name`, or None."""
    cards = cards_named(name)
    return cards[0] if cards else None


def cards_named(name: str) -> list[Card]:
    """Return the cards that match a driver's GPU name, or words of a name in cards.yaml.

    A GPU that is not in cards.yaml gets an estimated speed if its peak FLOP/s is known.
    """
    for card in CARDS.values():
        if is_named(card.name, name):
            return [card]
    requested = _words(name)
    matching = [card for card in CARDS.values() if requested <= _words(card.card)]
    if requested and matching:
        return matching
    peak = peak_flops(name)
    if peak is None:
        return []
    return [
        Card(
            card=name,
            name=name,
            memory_gb=None,
            tokens_per_second=LEAST_SHARE * peak / GPT2_FLOPS_PER_TOKEN,
            speed=f"estimated at {LEAST_SHARE:.0%} of the peak, the lowest share of a published speed",
        )
    ]


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
            fix = "Pass --tokens_per_second"
            if self.card not in CARDS:
                fix += ", or --gpu CARD to plan for another machine"
            return [f"{heading}: the speed of this run is not known. {fix}."]
        if self.usd and self.usd_per_hour:
            total = f"${self.usd:,.2f} at ${self.usd_per_hour:,.2f} an hour ({self.price})"
        else:
            total = f"{duration(60 * self.minutes)} Pass --usd_per_hour for the cost."
        cells: list[list[Cell]] = []
        for activity in [*self.budget, Activity("total", self.minutes, total)]:
            time = Cell(f"{activity.minutes:,.1f} min", "number")
            cells.append([Cell(activity.name), time, Cell(activity.basis)])
        return [f"{heading}:", *Table(["activity", "time", "basis"], cells).lines(), f"speed: {self.speed}"]


def budget(work: Workload, tokens_per_second: float, *, cards: int, basis: str) -> list[Activity]:
    """Return the activities on a rented machine.

    Args:
        tokens_per_second: the speed of all GPUs together.
        cards: number of GPUs.
        basis: the basis of the speed: "typed" (passed as an option) or one of `Card.basis`.
    """
    training = work.tokens / tokens_per_second / 60
    saves = work.saves
    if work.save_minutes:
        saves = max(saves, 1 + int(training / work.save_minutes))
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
        Activity("evaluation", _evaluation_minutes(work, cards), "assumed"),
        Activity("sync", copied / SYNC_BYTES_PER_SECOND / 60, "assumed"),
    ]
    return [activity for activity in activities if activity.minutes]


def _evaluation_minutes(work: Workload, cards: int) -> float:
    """Return the minutes of evaluate.sh, which starts one process per GPU. The processes share the texts."""
    on_one_card = EVALUATION * max(1, work.parameters / 300e6)
    scoring = on_one_card - EVALUATION_START
    return EVALUATION_START + scoring / min(cards, CARDS_OF_A_MACHINE)  # evaluate.sh uses one machine


def cost_of(work: Workload, name: str, cards: int, *, usd_per_hour: float = 0, speed: float = 0) -> RunCost:
    """Return minutes and dollars of a run on a machine.

    Args:
        name: GPU name that the driver reports, or some words of a card's name in cards.yaml.
        cards: number of GPUs.
        usd_per_hour: price of the complete machine, 0 for the list price.
        speed: tokens per second of all GPUs together, 0 for the speed in cards.yaml.
    """
    card = card_named(name)
    list_price = price_of(name)
    if usd_per_hour:
        price = "passed as an option"
    elif list_price:
        price = str(list_price)
        usd_per_hour = list_price.usd_per_hour * cards
    else:
        price = None
    rate: Rate | None = None
    if speed:
        rate = Rate(speed, "typed", f"{speed:,.0f} tokens/s, passed as an option")
    elif card:
        rate = _rate_on(card, work, cards)
    return RunCost(
        card=card.card if card else name,
        cards=cards,
        speed=rate.origin if rate else None,
        usd_per_hour=usd_per_hour or None,
        price=price,
        budget=budget(work, rate.tokens_per_second, cards=cards, basis=rate.basis) if rate else [],
    )


class Rate(NamedTuple):
    """A training speed of all GPUs together."""

    tokens_per_second: float
    basis: str  # see Activity.basis
    origin: str


def _rate_on(card: Card, work: Workload, cards: int) -> Rate | None:
    """Return the speed of a run on a number of cards, or None if it does not follow from the speed of GPT-2 124M."""
    if not work.is_fast:
        return None
    speed = card.tokens_per_second * cards
    ratio = work.flops / work.tokens / GPT2_FLOPS_PER_TOKEN
    if work.model_type == "gpt2" and abs(ratio - 1) <= 0.02:
        return Rate(speed, card.basis, card.speed)
    return Rate(speed / ratio, "estimated", f"{card.speed}; scaled from GPT-2 124M by the FLOPs per token")


class Offer(NamedTuple):
    """The training steps of GPT-2 124M on 10B tokens at a list price."""

    usd: float
    hours: float
    price: Price


def offer_lines() -> list[str]:
    """Return the ten cheapest list prices for GPT-2 124M on 10B tokens as lines of text."""
    # Training steps only, without start-up, validation, saving and evaluation.
    offers: list[Offer] = []
    for price in PRICES:
        hours = 10e9 / CARDS[price.card].tokens_per_second / 3600
        offers.append(Offer(hours * price.usd_per_hour, hours, price))
    cells: list[list[Cell]] = []
    for offer in sorted(offers)[:10]:
        card = offer.price.card
        if CARDS[card].basis == "estimated":
            card += "*"
        terms = f"${offer.price.usd_per_hour:.2f} an hour, {offer.price.provider}, {offer.price.date}"
        cost = Cell(f"${offer.usd:,.2f}", "number")
        time = Cell(f"{offer.hours:.1f} h", "number")
        cells.append([cost, time, Cell(card), Cell(terms)])
    title = "Cost of training GPT-2 124M on 10B tokens with one GPU, training steps only (*: estimated speed):"
    return [title, *Table(["cost", "time", "GPU", "list price"], cells).lines()]

"""Estimate the minutes and dollars of a run from list prices and training speeds."""

import dataclasses
import datetime
import math
import re
from typing import NamedTuple

from gpt2_repro.files import read_table
from gpt2_repro.hardware import is_named, peak_flops
from gpt2_repro.text import Cell, Table


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
# Seconds by which the collectives between machines lengthen an optimizer step, for each parameter. MPT with 125M
# parameters took 0.391 s per pass on 8 A100 40 GB, 0.408 s on 16 and 0.419 s on 32, with 1,600 Gbit/s between the
# machines (llm-foundry 8c8dd48, scripts/train/benchmarking/README.md; FSDP). The sums of a ring grow with
# (machines - 1) / machines. Assumed for every card, model and network of this speed: this project has not measured it.
SECONDS_BETWEEN_MACHINES = 2 * 0.0173 / 125.3e6
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
        machines = machines_of(self.cards)
        if machines > 1 and self.card in CARDS:
            heading += f" ({machines} machines of {CARDS_OF_A_MACHINE})"
        if not self.minutes:
            fix = "Pass --tokens_per_second."
            if self.card not in CARDS:
                fix += " For prices on other machines, pass --gpu NAME, or --gpu list."
            return [f"{heading}: the speed of this run is not known. {fix}"]
        hours = self.minutes / 60
        if self.usd and self.usd_per_hour:
            total = f"{hours:,.1f} h, ${self.usd:,.2f} at ${self.usd_per_hour:,.2f} an hour ({self.price})"
        else:
            total = f"{hours:,.1f} h. Pass --usd_per_hour for the cost."
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
        basis: the basis of the speed, see `Activity.basis`.
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


def machines_of(cards: int) -> int:
    """Return the number of machines with 8 GPUs for a number of GPUs."""
    return max(1, math.ceil(cards / CARDS_OF_A_MACHINE))


def _rate_on(card: Card, work: Workload, cards: int) -> Rate | None:
    """Return the speed of a run on a number of cards, or None if it does not follow from the speed of GPT-2 124M."""
    if not work.is_fast:
        return None
    speed = card.tokens_per_second * cards
    basis = card.basis
    origin = card.speed
    ratio = work.flops / work.tokens / GPT2_FLOPS_PER_TOKEN
    if work.model_type != "gpt2" or abs(ratio - 1) > 0.02:
        speed /= ratio
        basis = "estimated"
        origin += "; scaled from GPT-2 124M by the FLOPs per token"
    machines = machines_of(cards)
    if machines > 1:
        alone = speed
        speed = _speed_between_machines(work, alone, machines)
        basis = "assumed"
        origin += f"; x {speed / alone:.2f} for the network between {machines} machines of 1,600 Gbit/s each (assumed)"
    return Rate(speed, basis, origin)


def _speed_between_machines(work: Workload, speed: float, machines: int) -> float:
    """Return the tokens per second of several machines, which together have `speed` without a network."""
    tokens_per_step = work.tokens / work.steps
    computing = tokens_per_step / speed
    communicating = SECONDS_BETWEEN_MACHINES * work.parameters * (machines - 1) / machines
    return tokens_per_step / (computing + communicating)


def offer_lines(work: Workload, cards: int) -> list[str]:
    """Return the price of a run on each card and at each list price as lines of text, the cheapest first."""
    offers: list[tuple[float, list[Cell]]] = []
    for price in PRICES:
        planned = cost_of(work, price.card, cards, usd_per_hour=cards * price.usd_per_hour)
        if planned.minutes is None or planned.usd is None:
            continue
        name = price.card
        if CARDS[price.card].basis == "estimated":
            name += "*"
        row = [
            Cell(f"${planned.usd:,.2f}", "number"),
            Cell(f"{planned.minutes / 60:,.1f} h", "number"),
            Cell(name),
            Cell(f"${price.usd_per_hour:.2f} an hour and GPU, {price.provider}, {price.date}"),
        ]
        offers.append((planned.usd, row))
    if not offers:
        return ["The speed of this run is not known on any card. Pass --gpu NAME and --tokens_per_second."]
    offers.sort(key=lambda offer: offer[0])
    title = f"Total price of the run on {cards} of these GPUs (*: the speed of the card is estimated):"
    return [title, *Table(["total", "time", "GPU", "list price"], [row for _, row in offers]).lines()]

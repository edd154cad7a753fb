"""What a card costs an hour, and how fast it is: tables in YAML, each row with its source."""

import dataclasses
import datetime
import functools
import re
from pathlib import Path
from typing import Any

import yaml

from gpt2_repro.hardware import is_named


@dataclasses.dataclass(frozen=True)
class Price:
    """A list price of one card of the table of cards."""

    card: str
    provider: str
    usd_per_hour: float
    date: datetime.date
    source: str

    def __str__(self) -> str:
        return f"{self.provider}'s list price of {self.date}"


@dataclasses.dataclass(frozen=True)
class Card:
    """What one card is known to do with GPT-2 124M.

    Args:
        name: a part of what the driver calls it.
        tokens_per_second: of training, rows of 1,024 tokens.
        speed: whose measurement that is.
        micro_batch: rows of a pass to start from.
        micro_batch_is: measured or estimated.
    """

    card: str
    name: str
    memory_gb: int
    tokens_per_second: float
    speed: str
    micro_batch: int
    micro_batch_is: str = "estimated"

    @property
    def is_estimated(self) -> bool:
        """Whether nobody has measured its speed."""
        return self.speed.startswith("estimated")


@functools.cache
def price_table() -> tuple[Price, ...]:
    """All rows, in the order in which they count."""
    return tuple(Price(**row) for row in _rows("gpu_prices.yaml"))


@functools.cache
def card_table() -> tuple[Card, ...]:
    """All rows, in the order in which they count."""
    return tuple(Card(**row) for row in _rows("cards.yaml"))


def price_of(name: str) -> Price | None:
    """The price of a card by its name, the driver's or the table's; None for one that has none."""
    card = card_of(name)
    return next((row for row in price_table() if card and row.card == card.card), None)


def card_of(name: str) -> Card | None:
    """What is known of a card by its name, the driver's or the table's; None for one that is not in the table."""
    return next(iter(cards_named(name)), None)


def cards_named(name: str) -> list[Card]:
    """The cards that a name can mean: the driver's for one of them, or some words of the table's name in their order."""
    if found := [row for row in card_table() if is_named(row.name, name)]:
        return found[:1]
    asked = _words(name)
    return [row for row in card_table() if asked and asked in _words(row.card)]


def _words(name: str) -> str:
    """`A100 SXM 40GB` as ` a100 sxm 40 gb `, so that whole words are found in whole words."""
    words = re.findall(r"[a-z]+\d*[a-z]*|\d+", name.lower())
    return f" {' '.join(words)} " if words else ""


def _rows(name: str) -> list[dict[str, Any]]:
    return yaml.safe_load(Path(__file__).with_name(name).read_text())

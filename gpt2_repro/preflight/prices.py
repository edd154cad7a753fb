"""Prices and speeds of cards: tables in YAML, each row with its source."""

import datetime
import functools
import re
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from gpt2_repro.hardware import is_named


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
        micro_batch: rows of a pass to start from, estimated.
    """

    card: str
    name: str
    memory_gb: int
    tokens_per_second: float
    speed: str
    micro_batch: int


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

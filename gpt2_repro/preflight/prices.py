"""What a card costs an hour: list prices, each with its date and source, in gpu_prices.yaml."""

import dataclasses
import datetime
import functools
from pathlib import Path

import yaml

from gpt2_repro.hardware import is_part_or_kin


TABLE = Path(__file__).with_name("gpu_prices.yaml")


@dataclasses.dataclass(frozen=True)
class Price:
    """A list price of one card. `name`: a part of what the driver calls it."""

    card: str
    name: str
    provider: str
    usd_per_hour: float
    date: datetime.date
    source: str

    def __str__(self) -> str:
        return f"{self.provider}'s list price of {self.date}"


@functools.cache
def price_table() -> tuple[Price, ...]:
    """All rows, in the order in which they count."""
    return tuple(Price(**row) for row in yaml.safe_load(TABLE.read_text()))


def price_of(name: str) -> Price | None:
    """The price of a card by the name that its driver reports; None for one that is not in the table."""
    return None if is_part_or_kin(name) else next((price for price in price_table() if price.name in name), None)

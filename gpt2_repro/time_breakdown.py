"""Break down the time of a run: every second belongs to one account."""

from collections.abc import Mapping
from typing import NamedTuple

from gpt2_repro.formatting import duration


# In the order of the table.
PARTS = {
    "startup": "start-up",  # with compiling
    "training": "training",
    "redone": "redone steps",  # steps that were repeated after a crash, and attempts that recorded nothing
    "data": "data",  # waiting for rows
    "validation": "validation and scoring",  # with HellaSwag and samples
    "saving": "saving",
    "idle": "idle",  # between two attempts of a supervised run
}


STEPS = ("training", "data")  # the parts of optimizer steps


class Line(NamedTuple):
    """An account of a run, or the total."""

    name: str
    seconds: float
    share: float
    usd: float | None  # None if the price is unknown


def breakdown(parts: Mapping[str, float], *, usd_per_hour: float | None) -> list[Line]:
    """Return a line for each account that is not empty, and the total; [] if no time has passed.

    Args:
        parts: seconds by the keys of PARTS.
        usd_per_hour: price of the whole machine, 0 or None if unknown.
    """
    total = sum(parts.values())
    entries = {name: parts.get(key, 0.0) for key, name in PARTS.items()}
    shown = {name: seconds for name, seconds in entries.items() if seconds} | ({"total": total} if total else {})
    return [
        Line(name, seconds, seconds / total, seconds / 3600 * usd_per_hour if usd_per_hour else None)
        for name, seconds in shown.items()
    ]


def breakdown_lines(parts: Mapping[str, float], *, usd_per_hour: float | None) -> list[str]:
    """Return the breakdown as lines of text: account, time, share, dollars."""
    return [
        f"{line.name:<22} {duration(line.seconds):>11} {line.share:>7.1%}"
        + (f" {f'${line.usd:,.2f}':>9}" if line.usd is not None else "")
        for line in breakdown(parts, usd_per_hour=usd_per_hour)
    ]

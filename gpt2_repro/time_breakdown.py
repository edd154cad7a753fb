"""What the time of a run was paid for: each second stands on one account."""

from collections.abc import Mapping
from typing import NamedTuple


# In the order in which a person reads them.
ACCOUNTS = {
    "startup": "start-up",
    "compile": "compiling",
    "steps": "training steps",
    "data_wait": "waiting for data",
    "validation": "validation",
    "hellaswag": "HellaSwag",
    "samples": "samples",
    "saves": "saving",
    "unknown": "not booked",  # of attempts that did not say, or died before they could
    "idle": "idle",  # between two attempts of a supervised run, in which the machine is paid and nothing runs
}


class Line(NamedTuple):
    """An account of a bill, or the whole of it."""

    name: str
    seconds: float
    share: float
    usd: float | None  # None where nobody knows the price


def bill(accounts: Mapping[str, float], *, usd_per_hour: float) -> list[Line]:
    """What stands on each account that is not empty, and the whole, in seconds and dollars; [] of no time.

    Args:
        accounts: seconds by the names of ACCOUNTS.
        usd_per_hour: of the whole machine, 0 for unknown.
    """
    whole = sum(accounts.values())
    entries = {name: accounts.get(key, 0.0) for key, name in ACCOUNTS.items()}
    shown = {name: seconds for name, seconds in entries.items() if seconds} | ({"in all": whole} if whole else {})
    return [
        Line(name, seconds, seconds / whole, seconds / 3600 * usd_per_hour if usd_per_hour else None)
        for name, seconds in shown.items()
    ]


def bill_lines(accounts: Mapping[str, float], *, usd_per_hour: float) -> list[str]:
    """The bill as lines of text: account, minutes and seconds, share, dollars."""
    return [
        f"{line.name:<17} {minutes(line.seconds):>7} {line.share:>7.1%}"
        + (f" {f'${line.usd:,.2f}':>9}" if line.usd is not None else "")
        for line in bill(accounts, usd_per_hour=usd_per_hour)
    ]


def minutes(seconds: float) -> str:
    """`91:05`, minutes and seconds."""
    return "{}:{:02}".format(*divmod(round(seconds), 60))

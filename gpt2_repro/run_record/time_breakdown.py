"""Divide the time of a run into parts such as training, validation and saving."""

from collections.abc import Mapping

from gpt2_repro.text import Cell, Table, duration


# The parts in the order of the table.
PARTS = {
    "startup": "start-up",  # including compilation
    "training": "training",
    "redone": "redone steps",  # steps repeated after a crash, and attempts that recorded nothing
    "data": "data",  # waiting for rows
    "validation": "validation and scoring",  # including HellaSwag and samples
    "saving": "saving",
    "idle": "idle",  # between two attempts of a supervised run
}
STEPS = ("training", "data")  # the parts that contain the time of optimizer steps


def goodput(parts: Mapping[str, float]) -> float:
    """Return the share of a run's time that was spent on steps that were kept."""
    return sum(parts.get(name, 0.0) for name in STEPS) / (sum(parts.values()) or 1.0)


def breakdown(parts: Mapping[str, float], *, usd_per_hour: float | None) -> list[list[str]]:
    """Return rows (name, time, share) for the parts, the total and the goodput.

    If the price of the complete machine is known, each row also has the cost in dollars.
    """
    total = sum(parts.values())
    accounts = {name: parts.get(key, 0.0) for key, name in PARTS.items()}
    accounts |= {"total": total, "goodput: training+data": goodput(parts) * total}
    times = {name: seconds for name, seconds in accounts.items() if seconds}
    costs = {name: [f"${time / 3600 * usd_per_hour:,.2f}"] if usd_per_hour else [] for name, time in times.items()}
    return [[name, duration(time), f"{time / total:.1%}", *costs[name]] for name, time in times.items()]


def breakdown_lines(parts: Mapping[str, float], *, usd_per_hour: float | None) -> list[str]:
    """Return the rows of `breakdown` as aligned lines of text."""
    rows = breakdown(parts, usd_per_hour=usd_per_hour)
    cells = [[Cell(name), *(Cell(text, "number") for text in texts)] for name, *texts in rows]
    return Table([""] * len(rows[0]), cells).lines()[1:]

"""Divide the time of a run into parts such as training, validation and saving."""

from collections.abc import Mapping

from gpt2_repro.files import read_table
from gpt2_repro.text import Cell, Table, duration


PARTS: dict[str, str] = read_table(__file__, "parts_of_time.yaml")  # in the order of the table
STEPS = ("training", "data")  # the parts that contain the time of optimizer steps


def goodput(parts: Mapping[str, float]) -> float:
    """Return the share of a run's time that was spent on steps that were kept."""
    return sum(parts.get(name, 0.0) for name in STEPS) / (sum(parts.values()) or 1.0)


def breakdown(parts: Mapping[str, float], *, usd_per_hour: float | None) -> Table:
    """Return a table with the time and the share of the parts, the total and the goodput.

    If the price of the complete machine is known, there is a column with the cost in dollars.
    """
    total = sum(parts.values())
    accounts = {name: parts.get(key, 0.0) for key, name in PARTS.items()}
    accounts |= {"total": total, "goodput: training+data": goodput(parts) * total}
    rows = []
    for name, seconds in accounts.items():
        cost = [f"${seconds / 3600 * usd_per_hour:,.2f}"] if usd_per_hour else []
        texts = [duration(seconds), f"{seconds / total:.1%}", *cost] if seconds else []
        rows.append([Cell(name), *(Cell(text, "number") for text in texts)])
    return Table(["activity", "time", "share", *(["cost"] if usd_per_hour else [])], [row for row in rows if row[1:]])

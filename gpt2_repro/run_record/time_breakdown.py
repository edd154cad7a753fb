"""Divide the time of a run into parts such as training, validation and saving."""

from collections.abc import Mapping

from gpt2_repro.text import Cell, Table, duration


# The parts of the time of a run, with their names in tables, in the order of the table.
PARTS = {
    "startup": "start-up",  # including compilation
    "training": "training",
    "redone": "redone steps",  # repeated after a crash, and attempts that recorded nothing
    "data": "data",  # waiting for rows
    "validation": "validation and scoring",  # including HellaSwag and samples
    "saving": "saving",
    "idle": "idle",  # between two attempts of a supervised run
}
STEPS = ("training", "data")  # the parts that contain the time of optimizer steps


def goodput(parts: Mapping[str, float]) -> float:
    """Return the share of a run's time that was spent on steps that were kept."""
    return sum(parts.get(name, 0.0) for name in STEPS) / (sum(parts.values()) or 1.0)


def breakdown(parts: Mapping[str, float], *, usd_per_hour: float | None) -> Table:
    """Return a table with the time and the share of the parts, the total and the goodput.

    If the price of the complete machine is known, there is a column with the cost in dollars.
    """
    total = sum(parts.values())
    seconds_of = {name: parts.get(part, 0.0) for part, name in PARTS.items()}
    seconds_of["total"] = total
    seconds_of["goodput: training+data"] = goodput(parts) * total
    headers = ["activity", "time", "share"]
    if usd_per_hour:
        headers.append("cost")
    rows: list[list[Cell]] = []
    for name, seconds in seconds_of.items():
        if not seconds:
            continue
        row = [Cell(name), Cell(duration(seconds), "number"), Cell(f"{seconds / total:.1%}", "number")]
        if usd_per_hour:
            row.append(Cell(f"${seconds / 3600 * usd_per_hour:,.2f}", "number"))
        rows.append(row)
    return Table(headers, rows)

"""Format sizes, token counts and durations for people."""

import datetime


def size(count: float) -> str:
    """Return a number of bytes as text, such as `1.2 GB` or `340 MB`."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def tokens(count: float) -> str:
    """Return a token count as text: `9.89B`, or `1,234,567` if below 100 million."""
    return f"{count / 1e9:.2f}B" if count >= 1e8 else f"{count:,.0f}"


def duration(seconds: float | None) -> str:
    """Return a duration as text, such as `4 min 12 s` or `3 h 05 min`."""
    if seconds is None:
        return "–"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes_rest = divmod(minutes, 60)
    if not minutes:
        return f"{rest} s"
    if not hours:
        return f"{minutes} min {rest:02} s" if rest else f"{minutes} min"
    if hours < 48:
        return f"{hours} h {minutes_rest:02} min"
    return f"{hours // 24} d {hours % 24} h"


def now() -> str:
    """Return the current UTC time in ISO format, without fractions of a second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")

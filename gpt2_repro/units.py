"""Numbers as people read them."""


def size(count: float) -> str:
    """Bytes: 1.2 GB, 340 MB."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def tokens(count: float) -> str:
    """9.89B, or every digit below a tenth of a billion."""
    return f"{count / 1e9:.2f}B" if count >= 1e8 else f"{count:,.0f}"


def duration(seconds: float) -> str:
    """In hours from 90 minutes on, else in minutes, at least one."""
    minutes = seconds / 60
    return f"{minutes / 60:.1f} h" if minutes >= 90 else f"{max(1, round(minutes))} min"

"""What a look at a machine finds: as it should be, to be known, or in the way."""

from typing import Literal, NamedTuple


class Finding(NamedTuple):
    """One line of a preflight: ✓ as it should be, ! to be known, ✗ in the way of the run."""

    mark: Literal["✓", "!", "✗"]
    about: str
    words: str

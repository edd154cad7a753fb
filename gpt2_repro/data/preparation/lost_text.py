"""Find what a tokenizer does not keep of a text: unknown text, upper case, line breaks or other characters."""

import itertools
from collections.abc import Iterable

from gpt2_repro.data.tokenizer import Encoder


SAMPLE = 200  # documents that are encoded and decoded again
SAMPLE_CHARACTERS = 10_000  # of each document


def describe_losses(documents: Iterable[str], encoder: Encoder) -> str:
    """Encode and decode the first documents, and describe in a sentence what is lost. "" if nothing is lost.

    Spaces are ignored, because many tokenizers decode them differently.
    """
    count = changed = tokens = unknown = 0
    kinds: dict[str, int] = {}
    for document in itertools.islice(documents, SAMPLE):
        text = document[:SAMPLE_CHARACTERS]
        trip = encoder.round_trip(text)
        count += 1
        tokens += trip.tokens
        unknown += trip.unknown
        lost = _kind_of_loss(text, trip.text)
        if trip.unknown:
            lost = "unknown text"
        if lost:
            changed += 1
            kinds[lost] = kinds.get(lost, 0) + 1
    if not changed:
        return ""
    parts = [f"{kind} in {number / count:.0%}" for kind, number in kinds.items()]
    share = f" ({unknown / tokens:.2%} of the tokens are unknown)" if unknown else ""
    return f"of the first {count:,} documents it loses {', '.join(parts)}{share}"


def _kind_of_loss(text: str, decoded: str) -> str:
    """Return which characters of a text the decoded ids do not have, or "" if they have all of them."""
    letters = "".join(text.split())
    decoded_letters = "".join(decoded.split())
    if letters != decoded_letters:
        return "upper case" if letters.lower() == decoded_letters else "characters"
    if "\n" in text.strip() and "\n" not in decoded:
        return "line breaks"
    return ""

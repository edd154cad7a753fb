"""Select documents and cut passages for the evaluation tasks of this project.

A passage is a text as in LAMBADA: a model must predict its last word. In LAMBADA 84 % of the last words occur earlier
in the passage, so a model can find them in the context. In the passages of this module all last words occur earlier.
If several words near the end of a passage could be its last word, the longest of these words is used. The first of
these words is not used, because it is mostly "the".
"""

import string
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from gpt2_repro.errors import UserError
from gpt2_repro.files import read_json_lines


NUM_PASSAGES = 200
SHORTEST, LONGEST = 40, 60  # words
SHORTEST_TARGET = 3  # letters
# Similar to WikiText-2's test split (1.29 MB), which takes minutes on a CPU.
MAX_BYTES = 1_300_000

Item = TypeVar("Item")


def evenly(items: Sequence[Item], count: int) -> list[Item]:
    """Return `count` items spread evenly over a sequence, in order.

    If the sequence has fewer items, return all of them.
    """
    count = min(count, len(items))
    return [items[index * len(items) // count] for index in range(count)]


def read_documents(path: Path, column: str = "text") -> list[str]:
    """Return the documents of a JSON Lines file, without blank documents.

    Each line is a JSON object such as {"text": "a document"}. `column` is the key of the document.

    Raises UserError for a line of another form, and for a file without documents.
    """
    documents = []
    for number, row in read_json_lines(path):
        if not isinstance(row, dict) or not isinstance(text := row.get(column), str):
            raise UserError(f'{path}: line {number} must be {{"{column}": "a document"}}.')
        if text.strip():
            documents.append(text)
    if not documents:
        raise UserError(f"{path} contains no documents. Pass a file with at least one document.")
    return documents


def documents_to_score(documents: Sequence[str]) -> list[str]:
    """Return evenly spread documents with about 1.3 MB (MAX_BYTES) of text in total."""
    num_bytes = sum(len(document.encode()) for document in documents)
    return evenly(documents, max(1, len(documents) * MAX_BYTES // num_bytes))


def cut_passages(documents: Sequence[str], count: int = NUM_PASSAGES) -> list[str]:
    """Return up to `count` passages, spread over the documents.

    Each document gives its first passage before any document gives a second passage. The same documents always give
    the same passages.
    """
    passages: list[str] = []
    # Use ten times as many documents as passages, because some are too short for a passage.
    sources = [passages_of(document) for document in evenly(documents, 10 * count)]
    while sources and len(passages) < count:
        found = [(source, passage) for source in sources if (passage := next(source, None)) is not None]
        passages += evenly([passage for _, passage in found], count - len(passages))
        sources = [source for source, _ in found]
    return passages


def passages_of(document: str) -> Iterator[str]:
    """Yield passages of 40 to 60 words from a document.

    The last word of a passage also occurs earlier in the passage.
    """
    words = document.split()
    start = 0
    while start + SHORTEST <= len(words):
        end = _passage_end(words[start : start + LONGEST])
        if end is not None:
            yield " ".join(words[start : start + end])
        start += end or LONGEST


def _passage_end(window: Sequence[str]) -> int | None:
    """Return how many words at the start of `window` form a passage, or None.

    `window` is a list of words. Return None if no word in this list can be the last word of a passage.
    """
    bare = [word.strip(string.punctuation) for word in window]
    candidates = [
        end
        for end in range(SHORTEST, len(window) + 1)
        if window[end - 1].isalpha() and len(window[end - 1]) >= SHORTEST_TARGET and window[end - 1] in bare[: end - 1]
    ]
    return max(candidates, key=lambda end: len(window[end - 1]), default=None)

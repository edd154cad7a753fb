"""The data of the project's own two tasks: whole documents, and passages in LAMBADA's form, scored on the last word.

In LAMBADA 84 % of the last words occur earlier in the passage, so that a model can find them by reading. Here all do.
Of the words that qualify near a passage's end the longest is taken: the first would mostly be "the".
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
# About as much text as WikiText-2's test split, 1.29 MB: minutes on a CPU.
MAX_BYTES = 1_300_000

Item = TypeVar("Item")


def evenly(items: Sequence[Item], count: int) -> list[Item]:
    """Return `count` items spread over the sequence, in order, or all if there are fewer."""
    count = min(count, len(items))
    return [items[index * len(items) // count] for index in range(count)]


def read_documents(path: Path, column: str = "text") -> list[str]:
    """Return the documents of a file of {"text": document} lines, or another column, without blank ones."""
    documents = []
    for number, row in read_json_lines(path):
        if not isinstance(row, dict) or not isinstance(text := row.get(column), str):
            raise UserError(f'line {number} of {path} is not {{"{column}": "a document"}}')
        if text.strip():
            documents.append(text)
    if not documents:
        raise UserError(f"{path} holds no document")
    return documents


def documents_to_score(documents: Sequence[str]) -> list[str]:
    """Return documents, spread evenly, of about MAX_BYTES of text."""
    num_bytes = sum(len(document.encode()) for document in documents)
    return evenly(documents, max(1, len(documents) * MAX_BYTES // num_bytes))


def cut_passages(documents: Sequence[str], count: int = NUM_PASSAGES) -> list[str]:
    """Return up to `count` passages, spread over the documents. The same documents give the same passages.

    Every document gives its first passage before any gives its second.
    """
    passages: list[str] = []
    # Ten times as many: some documents are too short to give a passage.
    sources = [passages_of(document) for document in evenly(documents, 10 * count)]
    while sources and len(passages) < count:
        found = [(source, passage) for source in sources if (passage := next(source, None)) is not None]
        passages += evenly([passage for _, passage in found], count - len(passages))
        sources = [source for source, _ in found]
    return passages


def passages_of(document: str) -> Iterator[str]:
    """Yield the passages of one document: 40 to 60 words, the last of which occurs before."""
    words = document.split()
    start = 0
    while start + SHORTEST <= len(words):
        end = _passage_end(words[start : start + LONGEST])
        if end is not None:
            yield " ".join(words[start : start + end])
        start += end or LONGEST


def _passage_end(window: Sequence[str]) -> int | None:
    """Return how many words of the window make a passage, or None if no word can be its last."""
    bare = [word.strip(string.punctuation) for word in window]
    candidates = [
        end
        for end in range(SHORTEST, len(window) + 1)
        if window[end - 1].isalpha() and len(window[end - 1]) >= SHORTEST_TARGET and window[end - 1] in bare[: end - 1]
    ]
    return max(candidates, key=lambda end: len(window[end - 1]), default=None)

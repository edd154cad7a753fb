"""Choose documents and passages of a validation text for the project's tasks."""

import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from gpt2_repro.errors import UserError
from gpt2_repro.files import read_json_lines


NUM_PASSAGES = 200
SHORTEST = 40  # words
LONGEST = 60  # words
SHORTEST_TARGET = 3  # letters
JOINERS = "\u200c\u200d"  # between letters of Persian, Hindi and other words
# Similar to WikiText-2's test split (1.29 MB), which takes minutes on a CPU.
MAX_BYTES = 1_300_000

Item = TypeVar("Item")


def evenly(items: Sequence[Item], count: int) -> list[Item]:
    """Return at most `count` items, spread evenly over a sequence and in order."""
    count = min(count, len(items))
    chosen: list[Item] = []
    for number in range(count):
        index = number * len(items) // count
        chosen.append(items[index])
    return chosen


def read_documents(path: Path) -> list[str]:
    """Return the non-blank documents of a JSON Lines file, or raise UserError."""
    documents: list[str] = []
    for number, row in list(read_json_lines(path)):
        if not isinstance(row, dict) or not isinstance(row.get("text"), str):
            raise UserError(f'{path}, line {number}, must be {{"text": "a document"}}.')
        text = row["text"]
        if text.strip():
            documents.append(text)
    if not documents:
        raise UserError(f"{path} contains no documents.")
    return documents


def documents_to_score(documents: Sequence[str]) -> list[str]:
    """Return evenly spread documents with about 1.3 MB (MAX_BYTES) of text in total."""
    num_bytes = sum(len(document.encode()) for document in documents)
    count = len(documents) * MAX_BYTES // num_bytes
    return evenly(documents, max(1, count))


def cut_passages(documents: Sequence[str]) -> list[str]:
    """Return up to NUM_PASSAGES passages (see `passages_of`), spread over the documents."""
    passages: list[str] = []
    # Use ten times as many documents as passages, because some are too short for a passage.
    sources = [passages_of(document) for document in evenly(documents, 10 * NUM_PASSAGES)]
    while sources and len(passages) < NUM_PASSAGES:
        next_passages: list[str] = []
        unfinished: list[Iterator[str]] = []
        for source in sources:
            passage = next(source, None)
            if passage is not None:
                next_passages.append(passage)
                unfinished.append(source)
        passages += evenly(next_passages, NUM_PASSAGES - len(passages))
        sources = unfinished
    return passages


def passages_of(document: str) -> Iterator[str]:
    """Yield passages of 40 to 60 words whose last word also occurs earlier."""
    words = document.split()
    start = 0
    while start + SHORTEST <= len(words):
        end = _passage_end(words[start : start + LONGEST])
        if end is not None:
            yield " ".join(words[start : start + end])
        start += end or LONGEST


def _passage_end(window: Sequence[str]) -> int | None:
    """Return the length of the passage at the start of `window` in words, if any."""
    # In LAMBADA 84 % of the last words occur earlier in the passage, so a model can find them in the context.
    bare = [_without_punctuation(word) for word in window]
    longest = 0
    best: int | None = None
    for end in range(SHORTEST, len(window) + 1):
        word = window[end - 1]
        context = bare[: end - 1]
        # The longest last word, because the first one is mostly "the".
        if _length(word) > longest and _is_target(word) and word in context:
            longest = _length(word)
            best = end
    return best


def _is_target(word: str) -> bool:
    """Return whether a word has only letters, vowel signs and accents, and enough of them."""
    if _length(word) < SHORTEST_TARGET or _is_mark(word[0]):
        return False
    return all(_is_letter(character) for character in word)


def _length(word: str) -> int:
    """Return the number of characters, where a letter and its accents are one character if Unicode has it."""
    return len(unicodedata.normalize("NFC", word))


def _is_mark(character: str) -> bool:
    return unicodedata.category(character).startswith("M")


def _is_letter(character: str) -> bool:
    """Return whether a character is a letter, a combining mark, or one of the joiners inside of words."""
    return character.isalpha() or _is_mark(character) or character in JOINERS


def _without_punctuation(word: str) -> str:
    """Return a word without punctuation and symbols at its ends, such as quotes, a danda or an Arabic comma."""
    start = 0
    end = len(word)
    while start < end and _is_punctuation(word[start]):
        start += 1
    while start < end and _is_punctuation(word[end - 1]):
        end -= 1
    return word[start:end]


def _is_punctuation(character: str) -> bool:
    return unicodedata.category(character).startswith(("P", "S"))
